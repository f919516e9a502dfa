# SPDX-License-Identifier: Apache-2.0
"""SGMV with swapped operands: h.T = A x.T here, delta.T = B h.T in `wgmma_expand`.

Legend: R rows, S separate sums over the input width H, M modules of the site.

wgmma's 64 rows are rank rows (or output columns), its N the tile's tokens: small tiles waste little.  Weights
come STAGES - 1 steps ahead, by pointer or TMA.  Loops are not warp-specialized: Triton would then overwrite a
descriptor before its loads end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import NOT_SPECIALIZED, dot, entry_of, first_with_same_a, matrix, rank_of

BLOCK_R = tl.constexpr(64)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def wgmma_shrink(
    x,
    rows,
    tiles,
    tables,
    h,
    slot_stride,
    table_base,
    min_rank,
    max_rank,
    num_rows,
    lanes,
    width,
    x_stride,
    h_width,
    X_DIVISOR: tl.constexpr,
    MODULES: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """h[s, module, position] = part s of x[row] @ A.T, fp32 [S, M, R, h_width]; undefined from the rank on.

    EVEN: the parts are whole steps.  An item is a tile of tokens, 64 rows of an A, and a part of H; items of
    the first 64 rank rows come first.
    """
    num_tiles = tl.load(tiles.num)
    steps = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLIT_K)
    per_lane = num_tiles * MODULES * SPLIT_K
    for item in tl.range(tl.program_id(0), per_lane * lanes, tl.num_programs(0)):
        r0 = (item // per_lane) * BLOCK_R
        split = item % SPLIT_K
        tile_and_module = (item % per_lane) // SPLIT_K
        module = tile_and_module % MODULES
        tile = tiles.table + (tile_and_module // MODULES) * 4
        position = tl.load(tile) + tl.arange(0, BLOCK_T)
        inside = position < tl.load(tile + 1)
        first_entry = entry_of(tl.load(tile + 2), tl.load(tile + 3), 0, slot_stride, table_base, MODULES)
        rank = rank_of(tables, first_entry + module, min_rank, max_rank)
        first = first_with_same_a(tables, first_entry, module, MODULES)
        if (r0 < rank) & (first == module):
            row = tl.load(rows + position, mask=inside, other=0) // X_DIVISOR
            x_rows = x + row[:, None].to(tl.int64) * x_stride
            a = matrix(tables.arena, tables.a_offset, first_entry + module, x.dtype.element_ty)
            r = r0 + tl.arange(0, BLOCK_R)
            a_rows = a + r[:, None] * width
            if TMA:
                a_tiles = tl.make_tensor_descriptor(a, [rank, width], [width, 1], [BLOCK_R, BLOCK_K])
            h_T = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
            for step in tl.range(0, steps, num_stages=STAGES):
                k0 = (split * steps + step) * BLOCK_K
                k = k0 + tl.arange(0, BLOCK_K)[None, :]
                # Most decode tiles have one row; without a mask all programs would read row 0.
                mask_RK, mask_TK = (r < rank)[:, None], inside[:, None]
                if not EVEN:
                    mask_RK, mask_TK = mask_RK & (k < width), mask_TK & (k < width)
                x_TK = tl.load(x_rows + k, mask=mask_TK, other=0.0)
                if TMA:
                    a_RK = a_tiles.load([r0, k0])
                else:
                    a_RK = tl.load(a_rows + k, mask=mask_RK, other=0.0)
                h_T = dot(a_RK, tl.trans(x_TK), h_T, INTERPRETED)
            h_rows = ((split * MODULES + module) * num_rows + position)[None, :].to(tl.int64) * h_width
            tl.store(h + h_rows + r[:, None], h_T, mask=inside[None, :])
