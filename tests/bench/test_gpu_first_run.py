# SPDX-License-Identifier: Apache-2.0
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
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import exchange_parts, first_run, host_parts, roofline_engine, roofline_parts
from bench.gpu.run_log import Log
from bench.harness.random_model import TINY
from bench.harness.released_models import GPT_OSS_20B, MIXTRAL_8X7B, QWEN3_30B_A3B, in_bf16, tiny
from moe_lora.families import shape_of

ROOT = Path(__file__).parents[2]
_FOLDER = Path(first_run.__file__).parent
_FILES = [*_FOLDER.glob("*_parts.py"), _FOLDER / "roofline_engine.py", _FOLDER / "first_run.py"]
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
    from moe_lora.kernels.triton.lora.segments import build_segments
    from moe_lora.kernels.triton.lora.triton_lora import lora_delta, lora_expand, lora_shrink

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
    functions = set().union(
        *(first_run.RUNS[name] for name in ("first", "more", "steps", "served", "tiles", "roofline"))
    )
    assert functions <= set(first_run.PARTS)
    assert {*first_run.RUNS["check"], *first_run.RUNS["tests"]} == set(first_run.COMMANDS)
    build = {"build": first_run.RUNS["check"]["build"]}
    with_build = {name: sum((build | run).values()) for name, run in first_run.RUNS.items()}
    assert all(seconds < 540 for seconds in with_build.values()), with_build
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


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_a_part_started_ends_with_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(first_run, "COMMANDS", {"hangs": "{folder}/child.py"})
    status, text = first_run.run_part(tmp_path, "hangs", 3, os.environ)
    assert status == "timeout"
    assert _ends(int(text)), "the child outlived its part"


def _ends(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet waited for, within 10 seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_carried_wheels_and_kernels_are_found_by_parts(tmp_path) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert first_run.carried(cache, scratch, {"A": "b"}) == {"A": "b"}
    (cache / "wheels").mkdir(parents=True)
    for tags in ("py3-none-any", f"{here}-{here}-linux_x86_64"):
        name = f"carried_{tags.partition('-')[0]}"
        with zipfile.ZipFile(cache / "wheels" / f"{name}-1.0-{tags}.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "print(__name__)")
    (cache / "triton-cache" / "key").mkdir(parents=True)
    found = first_run.carried(cache, scratch, {**os.environ, "PYTHONPATH": "before"})
    assert found["PYTHONPATH"].split(os.pathsep)[1:] == ["before"]
    program = f"import carried_py3, carried_{here}"
    done = subprocess.run([sys.executable, "-c", program], env=found, capture_output=True, text=True)
    assert done.stdout.split() == ["carried_py3", f"carried_{here}"], done.stderr
    assert (Path(found["TRITON_CACHE_DIR"]) / "key").is_dir()
    assert Path(found["TRITON_CACHE_DIR"]) != cache / "triton-cache", "parts write there"
    assert "PYTHONPATH" in first_run.carried(cache, scratch, {}), "a second run on the same machine"
    (cache / "wheels" / "other-1.0-cp39-cp39-linux_x86_64.whl").touch()
    assert "PYTHONPATH" not in first_run.carried(cache, scratch, {}), "they are another Python's"


GPU_FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests").rglob("test_*.py")
    if "pytest.mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)
)


def test_every_file_with_tests_for_a_gpu_is_named() -> None:
    assert len(GPU_FILES) >= 5
    for name in GPU_FILES:
        assert any(Path(name).is_relative_to(one) for one in first_run.GPU_TESTS), name
    assert all((ROOT / one).exists() for one in first_run.GPU_TESTS)


def test_files_with_tests_for_a_gpu_need_no_torchao() -> None:
    """It is not where a GPU is; a file that can't be imported ends the part."""
    named = [ROOT / one for one in first_run.GPU_TESTS]
    left = [path for one in named for path in (one.glob("*.py") if one.is_dir() else [one])]
    seen: set[Path] = set()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        conftests = [parent / "conftest.py" for parent in path.parents if parent.is_relative_to(ROOT)]
        left += [one for one in conftests if one.exists() and path.is_relative_to(ROOT / "tests")]
        for module in _imported_at_the_top(path):
            assert module.partition(".")[0] != "torchao", f"{path.relative_to(ROOT)} imports {module}"
            place = ROOT.joinpath(*module.split("."))
            left += [one for one in (place.with_suffix(".py"), place / "__init__.py") if one.exists()]
    assert {"tests/engine/test_cuda.py", "bench/gpu/gpu_smoke.py", "tests/conftest.py"} <= {
        str(path.relative_to(ROOT)) for path in seen
    }


def _imported_at_the_top(path: Path) -> Iterator[str]:
    """Modules, and what may be modules in them."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            yield module
            yield from (f"{module}.{one.name}" for one in node.names)


NEEDS_NO_CARRIED = """
import importlib, sys
from bench.gpu.kernel_parts import CARRIED
sys.modules.update(dict.fromkeys(CARRIED))
for module in {modules!r}:
    importlib.import_module(module)
"""


@pytest.mark.slow
def test_parts_of_kernels_need_nothing_that_is_carried() -> None:
    """So that they run where a tree came without wheels: `sampling` and engines do not."""
    pytest.importorskip("triton")
    of_engines = ("bench.engine", "bench.harness.random_model", "moe_lora.engine", "moe_lora.core.request")
    names = ("kernel_parts", "lora_parts", "expert_parts", "quantised_parts", "exchange_parts")
    modules = {
        node.module or ""
        for name in names
        for node in ast.walk(ast.parse((_FOLDER / f"{name}.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and not node.level
    }
    own = sorted(one for one in modules if one.startswith(("moe_lora.", "bench.")))
    wanted = [one for one in own if not one.startswith(of_engines)]
    assert {"moe_lora.kernels.triton.lora.triton_lora", "bench.gpu.aot.aot_check"} <= set(wanted)
    program = NEEDS_NO_CARRIED.format(modules=["bench.gpu.first_run", *wanted])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_library_of_nvshmem_is_linked_where_the_wheel_has_one_an_architecture(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("NVSHMEM_LIB_DIR", raising=False)
    wheel, scratch = tmp_path / "lib", tmp_path / "links"
    wheel.mkdir()
    assert exchange_parts.device_library(None, scratch) == {}
    assert exchange_parts.device_library(wheel, scratch) == {}
    for arch in ("sm_80", "sm_90", "sm_100"):
        (wheel / f"libnvshmem_device_{arch}.bc").write_text(arch)
    for _ in range(2):
        found = exchange_parts.device_library(wheel, scratch)
        assert (Path(found["NVSHMEM_LIB_DIR"]) / "libnvshmem_device.bc").read_text() == "sm_90"
    (wheel / "libnvshmem_device.bc").write_text("all")
    assert exchange_parts.device_library(wheel, scratch) == {}, "torch finds it"


def test_parts_of_real_sizes_run_on_a_cpu_and_claim_nothing(tmp_path) -> None:
    """So that no misspelt name costs minutes of a GPU."""
    log = Log(tmp_path, quick=True)
    for part in ("qwen3", "gpt_oss", "mixtral", "zipf_adapters", "dependent"):
        first_run.PARTS[part](log)
    found = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    parts = {"rates", "same_bits", "decode", "prefill", "zipf_adapters", "dependent"}
    assert {one["part"] for one in found} == parts
    claims = ("_ms", "TB_s", "TFLOP_s", "of_", "_per_s")
    for one in found:
        assert one["device"] == "cpu"
        assert one.get("model", "tiny").startswith("tiny")
        assert not [name for name in one if name.startswith(claims) or name.endswith(claims)], one
    decoded = [one for one in found if one["part"] == "decode"]
    assert [one["batch"] for one in decoded] == [1, 4] * 3
    assert all(one["bytes"]["weights"] > 0 < one["bytes"]["kv"] for one in decoded)
    arms = [one for one in found if one["part"] == "zipf_adapters" and "bytes" in one]
    numbers = {(one["arm"], one["adapters"], one["bytes"]["adapters"] > 0) for one in arms}
    assert numbers == {("base", 0, False), ("zipf", 2, True), ("distinct", 4, True)}
    assert all(one["as_launched"] and one["as_eager"] for one in found if one["part"] == "same_bits")


def test_models_are_cut_to_the_layers_that_fit() -> None:
    fit, real = roofline_engine.layers_that_fit, roofline_engine.REAL
    assert fit(QWEN3_30B_A3B, real, 0, float("inf")) == fit(QWEN3_30B_A3B, real, 0, 84e9) == 48
    assert 16 < fit(MIXTRAL_8X7B, real, 0, 84e9) < 32
    assert 10 < fit(QWEN3_30B_A3B, real, 27, 84e9) < fit(QWEN3_30B_A3B, real, 27, 149e9) < 48
    assert fit(MIXTRAL_8X7B, real, 0, 1e9) == 1


def test_products_of_a_prefill_by_hand() -> None:
    shape = shape_of(tiny(in_bf16(GPT_OSS_20B)))
    # Hidden and inner 64, heads 4 and 2 of 16, 2 of 4 experts, vocabulary 256, two layers; three tokens.
    row = 64 * 128 + 64 * 64 + 64 * 4 + 2 * (64 * 128 + 64 * 64)
    pairs = {0: 1 + 2 + 3, 2: 1 + 2 + 2}
    by_hand = 2 * (3 * 2 * row + 64 * 256) + 4 * (pairs[0] + pairs[2]) * 4 * 16
    assert roofline_parts.prefill_flops(shape, (2, 0), 1, 3) == by_hand
    assert roofline_parts.prefill_flops(shape, (2, 0), 5, 3) == 5 * by_hand


def test_what_parts_launch_is_compiled_ahead(tmp_path, monkeypatch) -> None:
    """From their own calls, here of small shapes on a CPU."""
    pytest.importorskip("triton")
    import torch

    from bench.gpu import expert_parts, kernel_parts, lora_parts
    from bench.kernels.lora_kernel_cases import Case
    from bench.kernels.lora_kernel_plan import TINY as SHAPES
    from bench.kernels.lora_kernel_plan import CaseSpec
    from moe_lora.kernels.triton import configs

    def small_case(shape, lora_rank, rows=64, adapters=64) -> Case:
        spec = CaseSpec(
            group="decode",
            shape=shape,
            num_rows=4,
            num_adapters=2,
            popularity="uniform",
            lora_ranks=(lora_rank,),
            dtype=torch.bfloat16,
            phases=("shrink", "expand"),
        )
        return Case(spec, torch.device("cpu"), 0)

    monkeypatch.setattr(configs, "interpreted", lambda: True)  # so that tensors of a CPU are taken
    monkeypatch.setattr(lora_parts, "case", small_case)
    monkeypatch.setattr(lora_parts, "shapes", lambda: {"gate_up": SHAPES[0], "o": SHAPES[2]})
    monkeypatch.setattr(expert_parts, "DEVICE", "cpu")
    monkeypatch.setattr(
        expert_parts, "MODELS", {"qwen3": (4, 2, 64, 64, False), "gpt_oss": (4, 2, 64, 64, True)}
    )
    monkeypatch.setattr(expert_parts, "BATCHES", (1, 64))
    monkeypatch.setattr(expert_parts, "TRIALS", {1: ({"num_stages": 5},), 64: ({"num_stages": 7},)})
    monkeypatch.setattr(lora_parts, "SITE_TRIALS", lora_parts.SITE_TRIALS[:1])

    def run(log: Log) -> None:
        kernel_parts.kernels_timed(log)
        lora_parts.lora_tiles(log)
        expert_parts.expert_tiles(log)

    builds = kernel_parts.builds_ahead(Log(tmp_path), run)
    assert '"error"' not in (tmp_path / "truth.jsonl").read_text()
    assert {"wgmma_shrink", "wgmma_expand", "expert_linear"} <= {b.kernel for b in builds}
    assert {1, 2} <= {build.meta.get("X_DIVISOR") for build in builds}
    assert {3, 5, 6, 7} <= {build.meta.get("STAGES") for build in builds}
    assert {True, False} <= {build.meta.get("TMA") for build in builds}
    assert not any(build.meta.get("DEPENDENT") for build in builds)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["facts", "--quick"], "not for ['facts']"),
        (["qwen3", "--layers", "0"], "argument --layers: must be at least 1"),
        (["qwen3", "--limit-s", "0"], "argument --limit-s: must be at least 1"),
        (["facts", "fact"], "unknown: ['fact']"),
    ],
)
def test_wrong_words_are_refused(words, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["first_run", str(tmp_path), *words])
    with pytest.raises(SystemExit) as refused:
        first_run.main()
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


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
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
    found = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert len(found) == 16
    assert max(one["error"] for one in found) < 0.01
