"""Shrink and expand in one kernel for small ranks: h stays on the chip.

Legend: H input width, C output columns, T tokens of a tile, M modules of the site.

Each item computes h of a tile for one module and then part of the module's columns, so parts recompute h:
their A comes from L2.  Worth it where a launch costs more than that, at small ranks and few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .entries import NOT_SPECIALIZED, dot, entry_of, matrix, put_delta, rank_of, rounded


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def fused_delta(
    x,
    rows,
    tiles,
    tables,
    y,
    slot_stride,
    table_base,
    min_rank,
    max_rank,
    width,
    widths,
    x_stride,
    y_stride,
    X_DIVISOR: tl.constexpr,
    MODULES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    COLUMN_PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[row, columns of module] = round(scale * (x[row] @ A.T) @ B.T) for adapters of rank <= BLOCK_R.

    h enters the second product as hi + lo of the model's dtype, as in `wgmma_shrink`.
    """
    dtype = x.dtype.element_ty
    total = tl.load(tiles.num) * MODULES * COLUMN_PARTS
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        part = item % COLUMN_PARTS
        module = (item // COLUMN_PARTS) % MODULES
        tile = tiles.table + (item // (COLUMN_PARTS * MODULES)) * 4
        position = tl.load(tile) + tl.arange(0, BLOCK_T)
        inside = position < tl.load(tile + 1)
        entry = entry_of(tl.load(tile + 2), tl.load(tile + 3), module, slot_stride, table_base, MODULES)
        rank = rank_of(tables, entry, min_rank, max_rank)
        if rank > 0:
            row = tl.load(rows + position, mask=inside, other=0)
            x_rows = x + (row // X_DIVISOR)[None, :].to(tl.int64) * x_stride
            a = matrix(tables.arena, tables.a_offset, entry, dtype)
            r = tl.arange(0, BLOCK_R)
            h_T = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
            for k0 in tl.range(0, width, BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)
                mask_RK = (r < rank)[:, None] & (k < width)[None, :]
                a_RK = tl.load(a + r[:, None] * width + k[None, :], mask=mask_RK, other=0.0)
                x_KT = tl.load(x_rows + k[:, None], mask=inside[None, :] & (k < width)[:, None], other=0.0)
                h_T = dot(a_RK, x_KT, h_T, INTERPRETED)
            h_T = tl.where((r < rank)[:, None], h_T, 0.0)
            high = rounded(h_T, dtype, INTERPRETED)
            low = rounded(h_T - high.to(tl.float32), dtype, INTERPRETED)
            out_width = tl.where(module == 0, widths[0], tl.where(module == 1, widths[1], widths[2]))
            base = tl.where(module == 0, 0, tl.where(module == 1, widths[0], widths[0] + widths[1]))
            b = matrix(tables.arena, tables.b_offset, entry, dtype)
            scale = tl.load(tables.scale + entry)
            y_rows = y + row[None, :].to(tl.int64) * y_stride + base
            for c0 in tl.range(part * BLOCK_C, out_width, COLUMN_PARTS * BLOCK_C, num_stages=STAGES):
                c = c0 + tl.arange(0, BLOCK_C)
                mask_RC = (r < rank)[:, None] & (c < out_width)[None, :]
                b_RC = tl.load(b + r[:, None] * out_width + c[None, :], mask=mask_RC, other=0.0)
                delta_T = dot(tl.trans(b_RC), high, tl.zeros((BLOCK_C, BLOCK_T), tl.float32), INTERPRETED)
                delta_T = dot(tl.trans(b_RC), low, delta_T, INTERPRETED)
                mask_CT = inside[None, :] & (c < out_width)[:, None]
                put_delta(y_rows + c[:, None], delta_T, scale, mask_CT, False, INTERPRETED)
