# SPDX-License-Identifier: Apache-2.0
"""The kernel tests here run twice: in Triton's interpreter, in a process of their own, and on a CUDA device.

`test_in_interpreter` starts the first run; outside of it, tests that use `device` are marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
    keep_types(tl)
    call_directly(interpreter)


def keep_types(tl: ModuleType) -> None:
    """Make each type of a block and each shape of a value once; values of equal types need no common type."""
    from triton.language.semantic import TritonSemantic

    shapes: dict[tuple[int, ...], tuple[object, object]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, object]] = {}
    make_block, checked = tl.block_type.__init__, TritonSemantic.binary_op_type_checking_impl
    same = {tl.float32, tl.int32, tl.int64}

    def make_tensor(self: tl.tensor, handle: object, kind: tl.dtype) -> None:
        shape = tuple(kind.shape.values) if kind.is_block() else ()
        if shape not in shapes:
            shapes[shape] = tl.core.tuple([tl.constexpr(one) for one in shape]), tl.constexpr(prod(shape))
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[shape]

    def make_block_once(self: tl.block_type, element: tl.dtype, shape: Sequence[int]) -> None:
        if type(element) is not tl.dtype:
            return make_block(self, element, shape)
        key = element.name, tuple(getattr(one, "value", one) for one in shape)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])
        return None

    def checked_if_unequal(
        self: TritonSemantic, lhs: object, rhs: object, *rest: bool, **how: bool
    ) -> tuple[object, object]:
        if type(lhs) is type(rhs) is tl.tensor and lhs.shape is rhs.shape and lhs.dtype is rhs.dtype in same:
            return lhs, rhs
        return checked(self, lhs, rhs, *rest, **how)

    tl.tensor.__init__, tl.block_type.__init__ = make_tensor, make_block_once
    TritonSemantic.binary_op_type_checking_impl = checked_if_unequal


def call_directly(interpreter: ModuleType) -> None:
    """Call what a function of the language wraps: not the check that there is a compiler."""
    semantic = interpreter.interpreter_semantic

    def patch(obj: object, name: str, member: Callable[..., object], _: object, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*args: object, **kwargs: object) -> object:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


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
