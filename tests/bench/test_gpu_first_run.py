"""The run that waits for a GPU must find what it imports, and call what is there as it is."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import first_run, host_parts
from bench.gpu.run_log import Log
from bench.harness.random_model import TINY

_FILES = [*Path(first_run.__file__).parent.glob("*_parts.py"), Path(first_run.__file__)]
_NODES = [node for path in _FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def _imports() -> Iterator[tuple[str, str | None]]:
    for node in _NODES:
        if isinstance(node, ast.Import):
            yield from ((one.name, None) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", one.name) for one in node.names)


OWN = sorted({one for one in _imports() if one[0].partition(".")[0] in ("moe_lora", "bench")}, key=str)


@pytest.mark.parametrize(("module", "name"), OWN)
def test_what_it_imports_is_there(module: str, name: str | None) -> None:
    if module.startswith("moe_lora.kernels.triton"):
        pytest.importorskip("triton")
    found = importlib.import_module(module)
    if name is not None and not hasattr(found, name):
        importlib.import_module(f"{module}.{name}")


def test_it_imports_from_both_packages() -> None:
    assert {module.partition(".")[0] for module, _ in OWN} == {"moe_lora", "bench"}


def test_calls_fit_the_functions_of_today() -> None:
    """Names of settings and methods that are reached on a GPU only."""
    pytest.importorskip("triton")
    from bench.kernels.lora_kernel_cases import Case
    from bench.kernels.lora_kernel_plan import CaseSpec
    from moe_lora import EngineConfig
    from moe_lora.dist.transport import nvshmem
    from moe_lora.kernels.operands import LoraOperands, SlotTable
    from moe_lora.kernels.triton.segments import build_segments
    from moe_lora.kernels.triton.triton_lora import lora_delta, lora_expand, lora_shrink

    inspect.signature(lora_shrink).bind(1, decode=True, segments=None, max_lora_rank=16)
    inspect.signature(lora_delta).bind(1, 2, decode=True, segments=None)
    inspect.signature(lora_expand).bind(1, 2)
    inspect.signature(Case.operands).bind(1, 0)
    inspect.signature(build_segments).bind(*range(4))
    assert {"token_slots", "ids", "slots", "site"} <= set(LoraOperands._fields)
    inspect.signature(SlotTable.write_layer).bind(*range(7))
    inspect.signature(nvshmem.register).bind()
    settings = {"device": "cuda", "eager": True, "decode_buckets": (16,), "max_num_seqs": 16}
    inspect.signature(EngineConfig).bind(model_dir="m", **settings)
    names = ("group", "shape", "num_rows", "num_adapters", "popularity", "lora_ranks", "dtype", "phases")
    inspect.signature(CaseSpec).bind(**dict.fromkeys(names))


@pytest.mark.slow
def test_part_of_host_workers_runs_and_its_prompts_are_the_hosts(tmp_path, capsys) -> None:
    """On a CPU, where both ways are the same."""
    log = Log(tmp_path)
    host_parts.same_tokens(log, "cpu", TINY)
    host_parts.prompt_times(log, "cpu", replace(TINY, num_experts=0, num_experts_per_token=0), (16,), 2)
    found = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert [one["what"] for one in found] == ["tokens", "tokens", "prompt"]
    assert all(one["cold_is_warm"] and one["rows_on_host"] > 0 for one in found[:2])
    assert found[0]["tokens"] == found[1]["tokens"]
    assert min(found[2]["rows_on_host"].values()) > 0.9


def test_parts_are_functions_and_have_limits() -> None:
    assert set(first_run.RUNS["first"]) | set(first_run.RUNS["more"]) <= set(first_run.PARTS)
    assert set(first_run.RUNS["check"]) == set(first_run.COMMANDS)
    with_build = [sum(({"build": 60} | run).values()) for run in first_run.RUNS.values()]
    assert with_build == [535, 225, 515], "less than nine minutes each"
    for command in first_run.COMMANDS.values():
        module = command.split()[1] if command.startswith("-m") else "setup"
        assert importlib.util.find_spec(module) is not None


def test_libraries_are_built_first_where_one_is_missing(tmp_path) -> None:
    parts = {"facts": 40, "lora": 80}
    for name in first_run.LIBRARIES:
        assert list(first_run.with_build(parts, tmp_path)) == ["build", "facts", "lora"]
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name.replace("*", ".abi3")).touch()
    assert first_run.with_build(parts, tmp_path) == parts
    assert [*first_run.with_build({"build": 60, "tests": 1}, tmp_path / "none")] == ["build", "tests"]


def test_a_part_that_hangs_or_fails_does_not_stop_the_next(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        first_run,
        "COMMANDS",
        {
            "hangs": "-c print('begun',flush=True);input(__import__('time').sleep(99))",
            "fails": "-c 1/0",
            "works": "-c print('{folder}')",
        },
    )
    assert first_run.run_all(tmp_path, "some", {"hangs": 2, "fails": 30, "works": 30}) == 2
    ends = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["status"] for one in ends] == ["timeout", 1, 0]
    assert ends[0]["tail"] == "begun\n"
    assert "ZeroDivisionError" in ends[1]["tail"]
    with tarfile.open(tmp_path / "some.tar.gz") as tar:
        names = {Path(name).name for name in tar.getnames()}
    assert names >= {"truth.jsonl", "hangs.txt", "fails.txt", "works.txt"}


def test_unknown_parts_are_refused(tmp_path) -> None:
    command = [sys.executable, "-m", "bench.gpu.first_run", str(tmp_path), "facts", "fact"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown: ['fact']" in done.stderr


@pytest.mark.slow
def test_part_of_quantised_layers_runs_in_every_format(tmp_path) -> None:
    """In Triton's interpreter, where it times nothing."""
    pytest.importorskip("triton")
    program = f"""
from pathlib import Path
from bench.gpu.quantised_parts import quantised
from bench.gpu.run_log import Log
layers = {{"dense": (0, 1, 32, 256), "experts": (2, 1, 32, 256)}}
quantised(Log(Path({str(tmp_path)!r})), "cpu", layers, (3,))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, check=True)
    found = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert len(found) == 16
    assert max(one["error"] for one in found) < 0.01
