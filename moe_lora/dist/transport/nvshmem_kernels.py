# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that put from the GPU through NVSHMEM's device library.

Import only with a GPU and libnvshmem_device.bc (NVSHMEM_LIB_DIR): decorating looks for the library.  Wheels
with one library per architecture need a copy of libnvshmem_device_sm_90.bc under this name.

Only a program's last put carries a signal: one of the library's threads adds.
"""
# mypy: disable-error-code="no-untyped-def,attr-defined,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.distributed._symmetric_memory._nvshmem_triton import (
    put,
    putmem_signal_block,
    quiet,
    requires_nvshmem,
)

from .device_puts import PUT_BLOCKS, STATUS_BYTES, WORDS_PER_SIGNAL, AnswerRows, SymmetricWindow

_SIGNAL_ADD = tl.constexpr(5)


@requires_nvshmem
@triton.jit
def put_pieces(first, first_bytes: tl.int64, second, second_bytes: tl.int64, signal, peer: tl.int32):
    """The peer's first[:first_bytes] = first, and second unless empty; each program adds 1 to the peer's
    signal for each.  first_bytes at least 1.
    """
    for piece in tl.static_range(2):
        place, num_bytes = (first, first_bytes)
        if piece == 1:
            place, num_bytes = (second, second_bytes)
        if num_bytes > 0:
            part = (tl.cdiv(num_bytes, tl.num_programs(0)) + 15) // 16 * 16
            # A program without a part repeats the last byte.
            start = tl.minimum(tl.program_id(0) * part, num_bytes - 1)
            count = tl.minimum(part, num_bytes - start)
            one = tl.full((), 1, tl.int64)
            putmem_signal_block(place + start, place + start, count, signal, one, _SIGNAL_ADD, peer)


@requires_nvshmem
@triton.jit
def put_rows(
    rows,
    row_bytes: tl.int64,
    num_rows: tl.int32,
    token_slots,
    ids,
    top_k: tl.int32,
    first_expert: tl.int32,
    end_expert: tl.int32,
    frame,
    generation,
    missing,
    state,
    over,
    status,
    signal,
    peer: tl.int32,
    HAS_IDS: tl.constexpr,
):
    """The peer's rows[r * row_bytes :] = row r, for its rows r (see `AnswerRows`); then each program's count
    of missing rows, with 1 for the peer's signal.

    A row of an evicted slot may have been read in part, and counts as missing.  status: int64 [2] per
    program.
    """
    if (tl.load(state) & over) != 0:
        return
    pid = tl.program_id(0)
    asked = tl.load(frame)
    count = tl.load(missing) * (pid == 0).to(tl.int64)
    for row in range(pid, num_rows, tl.num_programs(0)):
        token = row // top_k
        slot = tl.load(token_slots + token)
        wanted = slot >= 0
        if HAS_IDS:
            expert = tl.load(ids + row)
            wanted = wanted & (expert >= first_expert) & (expert < end_expert)
        if wanted:
            start = row * row_bytes
            put(rows + start, rows + start, row_bytes, peer)
            left = tl.load(generation + slot, volatile=True) > tl.load(frame + 1 + asked + token)
            count += left.to(tl.int64)
    place = status + pid * 2
    tl.store(place, count)
    quiet()  # a signal orders only its own bytes
    tl.debug_barrier()
    one, num_bytes = tl.full((), 1, tl.int64), tl.full((), 16, tl.int64)
    putmem_signal_block(place, place, num_bytes, signal, one, _SIGNAL_ADD, peer)


def launch_put_pieces(
    window: SymmetricWindow, places: Sequence[tuple[int, int]], signal: int, peer: int
) -> None:
    """See `DevicePuts`."""
    operands: list[Any] = []
    for offset_bytes, num_bytes in places:
        operands += [window.bytes[offset_bytes:], num_bytes]
    if len(places) == 1:
        operands += [window.bytes, 0]
    word = window.words[signal * WORDS_PER_SIGNAL :]
    put_pieces[(PUT_BLOCKS,)](*operands, word, peer, num_warps=32)


def launch_put_rows(
    window: SymmetricWindow, answer: AnswerRows, status_bytes: int, signal: int, peer: int
) -> None:
    """See `DevicePuts`."""
    rows, end_bytes = answer.rows, status_bytes + PUT_BLOCKS * STATUS_BYTES
    put_rows[(PUT_BLOCKS,)](
        *(rows.view(torch.uint8), rows.shape[1] * rows.element_size(), len(rows)),
        *(answer.token_slots, answer.token_slots if answer.ids is None else answer.ids),
        *(answer.top_k, answer.first_expert, answer.end_expert, answer.frame, answer.generation),
        *(answer.missing, answer.state, answer.over),
        *(window.bytes[status_bytes:end_bytes].view(torch.int64), window.words[signal * WORDS_PER_SIGNAL :]),
        peer,
        HAS_IDS=answer.ids is not None,
        num_warps=32,
    )
