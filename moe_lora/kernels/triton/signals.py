# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for calls from a stream to a host process.

Access to mapped host memory is by plain loads and stores of system scope: atomics over PCIe depend on the
machine, and could undo a store of the host.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import configs

_STORE = tl.constexpr(
    """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.b64 [$1], $2;
    mov.b64 $0, $2;
    }"""
)
_LOAD = tl.constexpr("ld.acquire.sys.global.b64 $0, [$1];")


@triton.jit(do_not_specialize=("layer", "site", "num_tokens", "top_k", "num_rows"))
def ask(counter, header, word, layer, site, num_tokens, top_k, num_rows, INTERPRETED: tl.constexpr):
    """header[:5] = the five numbers; counter += 1; then word = counter.  One program."""
    tl.store(header, layer.to(tl.int64))
    tl.store(header + 1, site.to(tl.int64))
    tl.store(header + 2, num_tokens.to(tl.int64))
    tl.store(header + 3, top_k.to(tl.int64))
    tl.store(header + 4, num_rows.to(tl.int64))
    use = tl.load(counter) + 1
    tl.store(counter, use)
    tl.debug_barrier()
    if INTERPRETED:
        tl.store(word, use)
    else:
        tl.inline_asm_elementwise(_STORE, "=l,l,l", [word.to(tl.int64), use], tl.int64, False, 1)


@triton.jit
def seen(word, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.load(word, volatile=True)
    return tl.inline_asm_elementwise(_LOAD, "=l,l", [word.to(tl.int64)], tl.int64, False, 1)


@triton.jit
def wait(counter, word, INTERPRETED: tl.constexpr):
    """Ends when word >= counter.  One program."""
    use = tl.load(counter)
    value = seen(word, INTERPRETED)
    while value < use:
        value = seen(word, INTERPRETED)


def launch_ask(counter: torch.Tensor, header: torch.Tensor, word: torch.Tensor, facts: Sequence[int]) -> None:
    """counter: int64 [1] of the device.  header (five or more), word: int64 of mapped host memory."""
    configs.start(ask, 1, counter, header, word, *facts, INTERPRETED=configs.interpreted(), num_warps=1)


def launch_wait(counter: torch.Tensor, word: torch.Tensor) -> None:
    """Later work on the stream starts once word >= counter."""
    configs.start(wait, 1, counter, word, INTERPRETED=configs.interpreted(), num_warps=1)
