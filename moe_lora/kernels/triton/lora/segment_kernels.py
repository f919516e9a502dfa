# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that sort rows into segments and cut tiles.

Legend: R rows, N slots, E experts.  A sorted position has four int32: first and last + 1 position of its
segment, slot, expert.  A tile has the same four for its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = ("num_rows", "num_slots", "num_experts", "tile_rows")
"""Numbers that must not trigger a compilation."""


@triton.jit
def _row_keys(
    row, token_slots, ids, num_rows, num_slots, num_experts, TOP_K: tl.constexpr, HAS_IDS: tl.constexpr
):
    """expert * N + slot of each row; E * N without an adapter, E * N + 1 past the last row."""
    inside = row < num_rows
    slot = tl.load(token_slots + row // TOP_K, mask=inside, other=-1)
    expert = tl.zeros_like(slot)
    if HAS_IDS:
        expert = tl.load(ids + row, mask=inside, other=-1)
    fits = (slot >= 0) & (slot < num_slots) & (expert >= 0) & (expert < num_experts)
    key = tl.where(fits, expert * num_slots + slot, num_experts * num_slots)
    return tl.where(inside, key, num_experts * num_slots + 1)


@triton.jit
def _cut(described, total, tiles, num_tiles, tile_rows, BLOCK: tl.constexpr):
    written = 0
    for first in tl.range(0, total, BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = position < total
        segment_first = tl.load(described + position * 4, mask=inside, other=0)
        segment_end = tl.load(described + position * 4 + 1, mask=inside, other=0)
        starts = inside & ((position - segment_first) % tile_rows == 0)
        tile = written + tl.cumsum(starts.to(tl.int32), axis=0) - 1
        tl.store(tiles + tile * 4, position, mask=starts)
        tl.store(tiles + tile * 4 + 1, tl.minimum(position + tile_rows, segment_end), mask=starts)
        for part in tl.static_range(2, 4):
            value = tl.load(described + position * 4 + part, mask=inside, other=0)
            tl.store(tiles + tile * 4 + part, value, mask=starts)
        written += tl.sum(starts.to(tl.int32), axis=0)
    tl.store(num_tiles, written)


@triton.jit
def sort_block(
    block,
    num_blocks,
    token_slots,
    ids,
    rows,
    described,
    count,
    tiles,
    num_tiles,
    sorted_blocks,
    num_rows,
    num_slots,
    num_experts,
    tile_rows,
    TOP_K: tl.constexpr,
    HAS_IDS: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    BLOCK_CUT: tl.constexpr,
):
    mine = block * BLOCK + tl.arange(0, BLOCK)
    key = _row_keys(mine, token_slots, ids, num_rows, num_slots, num_experts, TOP_K, HAS_IDS)
    smaller = tl.zeros((BLOCK,), tl.int32)
    before = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    with_adapter = 0
    for first in tl.range(0, num_rows, BLOCK_OTHER):
        other = first + tl.arange(0, BLOCK_OTHER)
        other_key = _row_keys(other, token_slots, ids, num_rows, num_slots, num_experts, TOP_K, HAS_IDS)
        same = other_key[None, :] == key[:, None]
        smaller += tl.sum((other_key[None, :] < key[:, None]).to(tl.int32), axis=1)
        before += tl.sum((same & (other[None, :] < mine[:, None])).to(tl.int32), axis=1)
        equal += tl.sum(same.to(tl.int32), axis=1)
        with_adapter += tl.sum((other_key < num_experts * num_slots).to(tl.int32), axis=0)
    inside = mine < num_rows
    position = smaller + before
    tl.store(rows + position, mine, mask=inside)
    none = key >= num_experts * num_slots
    tl.store(described + position * 4, smaller, mask=inside)
    tl.store(described + position * 4 + 1, smaller + equal, mask=inside)
    tl.store(described + position * 4 + 2, tl.where(none, -1, key % num_slots), mask=inside)
    tl.store(described + position * 4 + 3, tl.where(none, -1, key // num_slots), mask=inside)
    if block == 0:
        tl.store(count, with_adapter)
    if CUT:
        tl.debug_barrier()
        done_before = tl.atomic_add(sorted_blocks, 1, sem="acq_rel")
        if done_before == num_blocks - 1:
            _cut(described, with_adapter, tiles, num_tiles, tile_rows, BLOCK_CUT)


@triton.jit(do_not_specialize=_SIZES)
def sort_rows(
    token_slots,
    ids,
    rows,
    described,
    count,
    tiles,
    num_tiles,
    sorted_blocks,
    num_rows,
    num_slots,
    num_experts,
    tile_rows,
    TOP_K: tl.constexpr,
    HAS_IDS: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    BLOCK_CUT: tl.constexpr,
):
    """Stable counting sort: a row's position is the number of rows before in (key, row) order.

    CUT: the last program cuts `tiles`; sorted_blocks [1] starts at 0.  Quadratic in R: for decode steps.
    """
    sort_block(
        tl.program_id(0),
        tl.num_programs(0),
        token_slots,
        ids,
        rows,
        described,
        count,
        tiles,
        num_tiles,
        sorted_blocks,
        num_rows,
        num_slots,
        num_experts,
        tile_rows,
        TOP_K,
        HAS_IDS,
        CUT,
        BLOCK,
        BLOCK_OTHER,
        BLOCK_CUT,
    )


@triton.jit(do_not_specialize=_SIZES)
def cut_tiles(described, count, tiles, num_tiles, tile_rows, BLOCK: tl.constexpr):
    """`_cut`, for tiles of a second size.  One program."""
    _cut(described, tl.load(count), tiles, num_tiles, tile_rows, BLOCK)
