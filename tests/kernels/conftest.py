# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.cpu import library as cpu_library


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
