# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.cpu import library as cpu_library


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cells as slow; the others have each value of each parameter with each instruction set.

    Parameters of one mark are one value: their tuples are chosen by hand.
    """
    grids: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        can_run = is_here and isinstance(item, pytest.Function) and not item.get_closest_marker("slow")
        if can_run and "isa" in item.fixturenames:
            grids[item.nodeid.partition("[")[0], item.callspec.params["isa"]].append(item)
    for cells in grids.values():
        values = {one: _values(one) for one in cells}
        missing, others = set().union(*values.values()), dict(values)
        while missing:
            cell = max(others, key=lambda one: len(values[one] & missing))
            missing -= others.pop(cell)
        for cell in others:
            cell.add_marker(pytest.mark.slow)


def _values(cell: pytest.Function) -> set[tuple[str, str]]:
    marks = [mark.args[0] for mark in cell.iter_markers("parametrize")]
    together = [one.replace(" ", "").split(",") if isinstance(one, str) else [*one] for one in marks]
    params = cell.callspec.params
    single = set(params).difference(*together)
    groups = [*together, *([name] for name in single)]
    return {(str(names), repr([params[name] for name in names])) for names in groups}


@pytest.fixture(params=["amx_bf16", "amx_emulated", "avx512_bf16", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has, in turn."""
    best = cpu.isa()
    try:
        cpu_library.set_isa(request.param)
    except ValueError:
        pytest.skip(f"this processor lacks {request.param}")
    yield request.param
    cpu_library.set_isa(best)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small work on one thread; tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
