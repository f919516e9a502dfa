# SPDX-License-Identifier: Apache-2.0
"""SGMV's second half with swapped operands: delta.T = B h.T; see `wgmma_shrink`.

h, the sum of its parts in order, is split into two numbers of the model's dtype (hi + lo): tensor cores then
lose nothing above the delta's rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import (
    NOT_SPECIALIZED,
    add_delta,
    dot,
    entry_of,
    first_with_same_a,
    matrix,
    module_of_block,
    num_blocks,
    rank_of,
    rounded,
)

BLOCK_R = tl.constexpr(64)


@triton.jit
def _hi_and_lo(
    h_rows,
    r,
    rank,
    inside,
    part_stride,
    DTYPE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h of rank rows r as two [r, tokens] tiles of DTYPE; h_rows: pointers to h of part 0."""
    mask = (r < rank)[:, None] & inside[None, :]
    pointers = h_rows[None, :] + r[:, None]
    h_RT = tl.load(pointers, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLIT_K):
        h_RT += tl.load(pointers + split * part_stride, mask=mask, other=0.0)
    high = rounded(h_RT, DTYPE, INTERPRETED)
    return high, rounded(h_RT - high.to(tl.float32), DTYPE, INTERPRETED)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def wgmma_expand(
    x,
    h,
    rows,
    tiles,
    tables,
    y,
    slot_stride,
    table_base,
    min_rank,
    max_rank,
    num_rows,
    widths,
    y_stride,
    h_width,
    MODULES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ONE_LANE: tl.constexpr,
    ADD: tl.constexpr,
    SUBTRACT: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCKS_PER_ITEM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[row, columns of module] (+)= scale * (sum over s of h[s]) @ B.T, rounded as in `entries.add_delta`.

    ONE_LANE: no rank above 64, so h is read once per item.  An item is a tile of tokens and up to
    BLOCKS_PER_ITEM column blocks.
    """
    groups = num_blocks(widths, BLOCK_C * BLOCKS_PER_ITEM)
    dtype = x.dtype.element_ty
    part_stride = (MODULES * num_rows).to(tl.int64) * h_width
    for item in tl.range(tl.program_id(0), tl.load(tiles.num) * groups, tl.num_programs(0)):
        tile = tiles.table + (item // groups) * 4
        position = tl.load(tile) + tl.arange(0, BLOCK_T)
        inside = position < tl.load(tile + 1)
        module, c_first, width, base = module_of_block(
            item % groups, widths, BLOCK_C * BLOCKS_PER_ITEM, MODULES
        )
        first_entry = entry_of(tl.load(tile + 2), tl.load(tile + 3), 0, slot_stride, table_base, MODULES)
        rank = rank_of(tables, first_entry + module, min_rank, max_rank)
        if rank > 0:
            first = first_with_same_a(tables, first_entry, module, MODULES)
            h_rows = h + (first * num_rows + position).to(tl.int64) * h_width
            scale = tl.load(tables.scale + first_entry + module)
            row = tl.load(rows + position, mask=inside, other=0)
            y_rows = y + row[None, :].to(tl.int64) * y_stride + base
            b = matrix(tables.arena, tables.b_offset, first_entry + module, dtype)
            if TMA:
                b_tiles = tl.make_tensor_descriptor(b, [rank, width], [width, 1], [BLOCK_R, BLOCK_C])
            lanes = 1
            if ONE_LANE:
                r = tl.arange(0, BLOCK_R)
                high, low = _hi_and_lo(h_rows, r, rank, inside, part_stride, dtype, SPLIT_K, INTERPRETED)
            else:
                lanes = tl.cdiv(rank, BLOCK_R)
            delta_T = tl.zeros((BLOCK_C, BLOCK_T), tl.float32)
            blocks = tl.minimum(BLOCKS_PER_ITEM, tl.cdiv(width - c_first, BLOCK_C))
            for step in tl.range(0, blocks * lanes, num_stages=STAGES):
                r0 = (step % lanes) * BLOCK_R
                c0 = c_first + (step // lanes) * BLOCK_C
                r_lane = r0 + tl.arange(0, BLOCK_R)
                c = c0 + tl.arange(0, BLOCK_C)
                if TMA:
                    b_RC = b_tiles.load([r0, c0])
                else:
                    mask_RC = (r_lane < rank)[:, None] & (c < width)[None, :]
                    b_RC = tl.load(b + r_lane[:, None] * width + c[None, :], mask=mask_RC, other=0.0)
                written = width
                if not ONE_LANE:
                    written = tl.where(step % lanes + 1 == lanes, width, 0)
                mask_CT = inside[None, :] & (c < written)[:, None]
                y_CT = y_rows + c[:, None]
                before = tl.zeros((BLOCK_C, BLOCK_T), y.dtype.element_ty)
                if ADD:
                    before = tl.load(y_CT, mask=mask_CT, other=0.0)
                if not ONE_LANE:
                    high, low = _hi_and_lo(
                        h_rows, r_lane, rank, inside, part_stride, dtype, SPLIT_K, INTERPRETED
                    )
                delta_T = tl.where(r0 == 0, 0.0, delta_T)
                delta_T = dot(tl.trans(b_RC), high, delta_T, INTERPRETED)
                delta_T = dot(tl.trans(b_RC), low, delta_T, INTERPRETED)
                result = add_delta(before, delta_T, scale, ADD, SUBTRACT, INTERPRETED)
                tl.store(y_CT, result, mask=mask_CT)
