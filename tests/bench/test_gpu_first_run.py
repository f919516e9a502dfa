"""The run that waits for a GPU must find what it imports, and call what is there as it is."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import first_run

_TREE = ast.parse(Path(first_run.__file__).read_text(encoding="utf-8"))


def _imports() -> Iterator[tuple[str, str | None]]:
    for node in ast.walk(_TREE):
        if isinstance(node, ast.Import):
            yield from ((one.name, None) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
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
    inspect.signature(SlotTable.checked_rank).bind(*range(4))
    inspect.signature(nvshmem.register).bind()
    settings = {"device": "cuda", "eager": True, "decode_buckets": (16,), "max_num_seqs": 16}
    inspect.signature(EngineConfig).bind(model_dir="m", **settings)
    names = ("group", "shape", "num_rows", "num_adapters", "popularity", "lora_ranks", "dtype", "phases")
    inspect.signature(CaseSpec).bind(**dict.fromkeys(names))


def test_parts_are_functions_and_have_limits() -> None:
    assert set(first_run.LIMITS_S) <= set(first_run.PARTS)
    assert sum(first_run.LIMITS_S.values()) == 525
