"""SGMV's second half with operands swapped: delta.T = B h.T; `wgmma_shrink` says how both work.

Legend: R rows, C output columns, M modules of the site.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .entries import (
    NOT_SPECIALIZED,
    dot,
    entry_of,
    first_with_same_a,
    matrix,
    module_of_block,
    num_blocks,
    put_delta,
    rank_of,
)

BLOCK_R = tl.constexpr(64)
BLOCK_C = tl.constexpr(64)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def wgmma_expand(
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
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCKS_PER_ITEM: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[row, columns of module] (+)= scale * h[position] @ B.T, rounded as `entries.put_delta` says.

    Each item is a tile of tokens and up to BLOCKS_PER_ITEM blocks of 64 columns of one module.
    """
    groups = num_blocks(widths, BLOCK_C * BLOCKS_PER_ITEM)
    h_rows = MODULES * num_rows
    h_tiles = tl.make_tensor_descriptor(h, [2 * h_rows, h_width], [h_width, 1], [BLOCK_T, BLOCK_R])
    for item in tl.range(tl.program_id(0), tl.load(tiles.num) * groups, tl.num_programs(0)):
        tile = tiles.table + (item // groups) * 4
        begin = tl.load(tile)
        position = begin + tl.arange(0, BLOCK_T)
        inside = position < tl.load(tile + 1)
        module, c_first, width, base = module_of_block(
            item % groups, widths, BLOCK_C * BLOCKS_PER_ITEM, MODULES
        )
        first_entry = entry_of(tl.load(tile + 2), tl.load(tile + 3), 0, slot_stride, table_base, MODULES)
        rank = rank_of(tables, first_entry + module, min_rank, max_rank)
        if rank > 0:
            h_row = first_with_same_a(tables, first_entry, module, MODULES) * num_rows + begin
            scale = tl.load(tables.scale + first_entry + module)
            row = tl.load(rows + position, mask=inside, other=0)
            y_rows = y + row[None, :].to(tl.int64) * y_stride + base
            b = matrix(tables.arena, tables.b_offset, first_entry + module, y.dtype.element_ty)
            if ALIGNED:
                b_tiles = tl.make_tensor_descriptor(b, [rank, width], [width, 1], [BLOCK_R, BLOCK_C])
            blocks = tl.minimum(BLOCKS_PER_ITEM, tl.cdiv(width - c_first, BLOCK_C))
            for block in tl.range(0, blocks, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
                c0 = c_first + block * BLOCK_C
                c = c0 + tl.arange(0, BLOCK_C)
                delta_T = tl.zeros((BLOCK_C, BLOCK_T), tl.float32)
                for r0 in tl.range(0, rank, BLOCK_R):
                    if ALIGNED:
                        b_RC = b_tiles.load([r0, c0])
                    else:
                        r = r0 + tl.arange(0, BLOCK_R)
                        mask_RC = (r < rank)[:, None] & (c < width)[None, :]
                        b_RC = tl.load(b + r[:, None] * width + c[None, :], mask=mask_RC, other=0.0)
                    h_TR = h_tiles.load([h_row, r0])
                    delta_T = dot(tl.trans(b_RC), tl.trans(h_TR), delta_T, INTERPRETED)
                    low_TR = h_tiles.load([h_row + h_rows, r0])
                    delta_T = dot(tl.trans(b_RC), tl.trans(low_TR), delta_T, INTERPRETED)
                mask_CT = inside[None, :] & (c < width)[:, None]
                put_delta(y_rows + c[:, None], delta_T, scale, mask_CT, ADD, INTERPRETED)
