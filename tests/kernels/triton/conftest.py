# SPDX-License-Identifier: Apache-2.0
"""The kernel tests here run twice: in Triton's interpreter, in a process of their own, and on a CUDA device.

`test_in_interpreter` starts the first run; outside of it, tests that use `device` are marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

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
        patch_once_a_launch()


def patch_once_a_launch() -> None:
    """Triton's interpreter replaces the language's functions at every call of a helper: a third of its time.

    Once a launch is enough, if the functions that the language's own helpers see are replaced too.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, languages = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda _: patch(languages)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


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
