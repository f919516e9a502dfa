# SPDX-License-Identifier: Apache-2.0
"""The kernel tests here run twice: in Triton's interpreter, in a process of their own, and on a CUDA device.

`test_in_interpreter` starts the first run; outside of it, tests that use `device` are marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.kernels.lora_spaces import SPACES
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import interpreted

SMALL = {
    "wgmma_shrink": {"block_t": 16, "block_k": 32, "split_k": 2, "part_k": 32},
    "wgmma_expand": {"block_t": 16, "block_c": 64, "blocks_per_item": 2},
    "vector_shrink": {"block_r": 16, "block_k": 32, "split_k": 2},
    "vector_expand": {"block_r": 16, "block_c": 64},
}
"""Blocks that make several steps of a small problem."""


def pytest_configure() -> None:
    if interpreted():
        interpret_faster()


def interpret_faster() -> None:
    """Remove work without an effect on results from Triton's interpreter: half of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter replaces the language's functions at every launch and call of a helper.
    patch, languages = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    once = cache(lambda: patch(languages))
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=bool) if once() else None
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)

    # Integer sums are computed in 64 bits again, for an assertion.  The assertion is off.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    # The interpreter makes a table of all types for each value.  bf16 is the upper half of fp32.
    dtype_of, convert = interpreter._get_np_dtype, interpreter._convert_float
    named: dict[str, np.dtype] = {}

    def known_dtype(dtype: tl.dtype) -> np.dtype:
        if type(dtype) is not tl.dtype:
            return dtype_of(dtype)
        if dtype.name not in named:
            named[dtype.name] = dtype_of(dtype)
        return named[dtype.name]

    def converted(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if source == tl.bfloat16 and target == tl.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16 and rounding is None:
            return (np.ascontiguousarray(data).view(np.uint32) >> 16).astype(np.uint16)
        return convert(data, source, target, rounding)

    interpreter._get_np_dtype, interpreter._convert_float = known_dtype, converted


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if interpreted():
        return
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def small_blocks() -> Iterator[None]:
    with ExitStack() as stack:
        for kernel, blocks in SMALL.items():
            config = {name: values[0] for name, values in SPACES[kernel].items()} | blocks
            stack.enter_context(configs.override(kernel, config))
        yield
