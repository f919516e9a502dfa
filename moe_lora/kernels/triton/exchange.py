# SPDX-License-Identifier: Apache-2.0
"""Triton kernels around one-sided puts.

A wait ends at its bound, or when `state` is set, and records the end there: later work on the stream is void.
Legend: T token rows, R rows of an answer, N output width.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import configs
from .signals import seen

WORDS = 8
LOST, STALE, ENDED = 1, 2, 4
"""Bits of a state: a wait hit its bound; an answer lacks rows; the owner stopped the wait."""
_LOST, _STALE, _OVER = tl.constexpr(LOST), tl.constexpr(STALE), tl.constexpr(LOST | ENDED)
NO_BOUND = 1 << 62
_COLUMNS = 512
_WORDS = tl.constexpr(WORDS)


@triton.jit(do_not_specialize=("first", "count", "stride", "more", "max_polls"))
def wait_signals(
    words,
    expected,
    state,
    first,
    count,
    stride,
    more,
    max_polls,
    status,
    BLOCKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait until signals first, first + stride, .. (count of them) advance by `more` since the last wait.

    status: per signal BLOCKS counts of missing rows, two int64 apart; above 0: STALE.  One program.
    """
    for number in range(count):
        signal = first + number * stride
        target = tl.load(expected + signal) + more
        tl.store(expected + signal, target)
        word = words + signal * _WORDS
        polls = max_polls * 0
        value = tl.load(word, volatile=True)
        while (value < target) & (polls < max_polls) & ((tl.load(state, volatile=True) & _OVER) == 0):
            value = tl.load(word, volatile=True)
            polls += 1
        if seen(word, INTERPRETED) < target:
            tl.store(state, tl.load(state) | _LOST)
        counts = status + number * stride * BLOCKS * 2
        for block in range(BLOCKS):
            if tl.load(counts + block * 2, volatile=True) > 0:
                tl.store(state, tl.load(state) | _STALE)


@triton.jit(do_not_specialize=("layer", "num_slots", "max_polls", "is_first"))
def admit(
    frame,
    generation,
    loaded,
    layer,
    num_layers: tl.constexpr,
    num_slots,
    token_slots,
    missing,
    state,
    max_polls,
    is_first,
    MAX_ROWS: tl.constexpr,
):
    """token_slots[t] = slot of token t after its layer has loaded, else -1.

    frame: int64 T, slots [T], generations [T].  generation: [M], loaded: [M, num_layers].  Ends when every
    slot has the layer or never will, or after max_polls.  missing: [1] += tokens without the layer.  One
    program.
    """
    rows = tl.arange(0, MAX_ROWS)
    num_rows = tl.load(frame)
    slot = tl.load(frame + 1 + rows, mask=rows < num_rows, other=-1)
    wanted = tl.load(frame + 1 + num_rows + rows, mask=rows < num_rows, other=0)
    asked = slot >= 0
    known = asked & (slot < num_slots)
    place = loaded + slot * num_layers + layer
    here = known & (tl.load(place, mask=known, other=0, volatile=True) == wanted)
    gone = known & (tl.load(generation + slot, mask=known, other=0, volatile=True) > wanted)
    waiting = tl.sum((known & ~here & ~gone).to(tl.int32))
    polls = max_polls * 0
    while (waiting > 0) & (polls < max_polls) & ((tl.load(state, volatile=True) & _OVER) == 0):
        here = known & (tl.load(place, mask=known, other=0, volatile=True) == wanted)
        gone = known & (tl.load(generation + slot, mask=known, other=0, volatile=True) > wanted)
        waiting = tl.sum((known & ~here & ~gone).to(tl.int32))
        polls += 1
    here = here & ~gone
    tl.store(token_slots + rows, tl.where(here, slot, -1).to(tl.int32))
    before = tl.load(missing)
    if is_first:
        before = before * 0
    tl.store(missing, before + tl.sum((asked & ~here).to(tl.int64)))


@triton.jit
def add_rows(
    y, y_stride, delta, frame, ids, top_k, num_columns, HAS_IDS: tl.constexpr, COLUMNS: tl.constexpr
):
    """y[r] = round(y[r] + delta[r]) for each row whose token has a slot."""
    row = tl.program_id(0)
    blocks = tl.cdiv(num_columns, COLUMNS)
    column = row % blocks * COLUMNS + tl.arange(0, COLUMNS)
    row = row // blocks
    wanted = tl.load(frame + 1 + row // top_k) >= 0
    if HAS_IDS:
        wanted = wanted & (tl.load(ids + row) >= 0)
    if wanted:
        within = column < num_columns
        place = y + row.to(tl.int64) * y_stride + column
        more = tl.load(delta + row.to(tl.int64) * num_columns + column, mask=within)
        total = tl.load(place, mask=within).to(tl.float32) + more.to(tl.float32)
        tl.store(place, total.to(y.dtype.element_ty), mask=within)


class Signals(NamedTuple):
    """Signals of a wait.  words: int64 [signals * WORDS].  expected: int64 [signals]."""

    words: torch.Tensor
    expected: torch.Tensor
    numbers: range


def launch_wait(
    signals: Signals,
    more: int,
    state: torch.Tensor,
    max_polls: int,
    status: tuple[torch.Tensor, int] | None = None,
) -> None:
    """See `wait_signals`.  state: int64 [1].  status: int64 counts, and BLOCKS."""
    words, expected, numbers = signals
    counts, blocks = status or (words, 0)
    configs.start(
        wait_signals,
        1,
        *(words, expected, state, numbers.start, len(numbers), numbers.step, more, max_polls, counts),
        BLOCKS=blocks,
        INTERPRETED=configs.interpreted(),
        num_warps=1,
    )


def launch_admit(
    frame: torch.Tensor,
    generation: torch.Tensor,
    loaded: torch.Tensor,
    layer: int,
    token_slots: torch.Tensor,
    missing: torch.Tensor,
    state: torch.Tensor,
    max_polls: int,
    is_first: bool,
) -> None:
    """See `admit`.  token_slots: int32 [a power of two]; rows beyond T get -1."""
    configs.start(
        admit,
        1,
        *(frame, generation, loaded, layer, loaded.shape[1], len(generation)),
        *(token_slots, missing, state, max_polls, int(is_first)),
        MAX_ROWS=len(token_slots),
        num_warps=4,
    )


def launch_add_rows(
    y: torch.Tensor, delta: torch.Tensor, frame: torch.Tensor, ids: torch.Tensor | None
) -> None:
    """See `add_rows`.  y, delta: [R, N]; ids: [T, K] int32, None if R = T."""
    num_rows, num_columns = delta.shape
    columns = min(_COLUMNS, triton.next_power_of_2(num_columns))
    top_k = 1 if ids is None else ids.shape[1]
    configs.start(
        add_rows,
        num_rows * triton.cdiv(num_columns, columns),
        *(y, y.stride(0), delta, frame, frame if ids is None else ids, top_k, num_columns),
        HAS_IDS=ids is not None,
        COLUMNS=columns,
        num_warps=4,
    )
