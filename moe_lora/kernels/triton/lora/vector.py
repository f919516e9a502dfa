# SPDX-License-Identifier: Apache-2.0
"""BGMV: one row per item, sums by threads; and the papers' per-row baselines.

Legend: see `wgmma_shrink`.  A tile's layout over threads decides the order of sums: addresses and strides of
x and y are not specialized.  PADDED: rows at the batch's maximum rank; reads behind a matrix stay inside the
arena and are discarded.
Source: Punica (arXiv 2310.18547); S-LoRA (arXiv 2311.03285), MBGMV.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import (
    NOT_SPECIALIZED,
    add_delta,
    entry_of,
    first_with_same_a,
    matrix,
    module_of_block,
    num_blocks,
    rank_of,
)

_NUMBERS = (*NOT_SPECIALIZED, "x_stride", "y_stride")


@triton.jit
def _weights(tables, offsets, entry, row, column, rank, width, arena_bytes, like, PADDED: tl.constexpr):
    """[rows, columns] of a matrix in fp32, zero past the true rank and width."""
    dtype = like.dtype.element_ty
    start = matrix(tables.arena, offsets, entry, dtype)
    true = (row < rank)[:, None] & (column < width)[None, :]
    if PADDED:
        size: tl.constexpr = dtype.primitive_bitwidth // 8
        last_row = ((arena_bytes - tl.load(offsets + entry)) // size - width) // 16 * 16
        row_start = row.to(tl.int64) * width
        row_start = tl.where(row < rank, row_start, tl.minimum(row_start, last_row))
        values = tl.load(
            start + row_start[:, None] + column[None, :], mask=(column < width)[None, :], other=0.0
        )
        return tl.where(true, values, 0.0).to(tl.float32)
    return tl.load(start + row[:, None] * width + column[None, :], mask=true, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("x", "y"))
def vector_shrink(
    x,
    rows,
    described,
    count,
    tables,
    h,
    slot_stride,
    table_base,
    min_rank,
    max_rank,
    arena_bytes,
    num_rows,
    lanes,
    width,
    x_stride,
    h_width,
    X_DIVISOR: tl.constexpr,
    MODULES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """h[s, module, position] = part s of x[row] @ A.T, fp32 [S, M, R, h_width].

    An item is a row, BLOCK_R rows of an A, and a part of H.
    """
    steps = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLIT_K)
    per_lane = tl.load(count) * MODULES * SPLIT_K
    for item in tl.range(tl.program_id(0), per_lane * lanes, tl.num_programs(0)):
        r0 = (item // per_lane) * BLOCK_R
        split = item % SPLIT_K
        module = (item // SPLIT_K) % MODULES
        position = (item % per_lane) // (SPLIT_K * MODULES)
        slot = tl.load(described + position * 4 + 2)
        if slot >= 0:
            expert = tl.load(described + position * 4 + 3)
            first_entry = entry_of(slot, expert, 0, slot_stride, table_base, MODULES)
            entry = first_entry + module
            rank = rank_of(tables, entry, min_rank, max_rank)
            first = first_with_same_a(tables, first_entry, module, MODULES)
            if (rank > 0) & (PADDED | (r0 < rank)) & (first == module):
                x_row = x + (tl.load(rows + position) // X_DIVISOR).to(tl.int64) * x_stride
                r = r0 + tl.arange(0, BLOCK_R)
                products = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
                for step in tl.range(0, steps, num_stages=STAGES):
                    k = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
                    x_K = tl.load(x_row + k, mask=k < width, other=0.0).to(tl.float32)
                    a_RK = _weights(tables, tables.a_offset, entry, r, k, rank, width, arena_bytes, x, PADDED)
                    products += a_RK * x_K[None, :]
                row = (split * MODULES + module) * num_rows + position
                tl.store(h + row.to(tl.int64) * h_width + r, tl.sum(products, axis=1), mask=r < h_width)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("x", "y"))
def vector_expand(
    x,
    h,
    rows,
    described,
    count,
    tables,
    y,
    slot_stride,
    table_base,
    min_rank,
    max_rank,
    arena_bytes,
    num_rows,
    padded_rank,
    widths,
    y_stride,
    h_width,
    MODULES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ADD: tl.constexpr,
    SUBTRACT: tl.constexpr,
    PADDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[row, columns of module] (+)= scale * (sum over s of h[s]) @ B.T, rounded as in `entries.add_delta`.

    An item is a row and a column block.
    """
    blocks = num_blocks(widths, BLOCK_C)
    for item in tl.range(tl.program_id(0), tl.load(count) * blocks, tl.num_programs(0)):
        position = item // blocks
        slot = tl.load(described + position * 4 + 2)
        if slot >= 0:
            module, c0, width, base = module_of_block(item % blocks, widths, BLOCK_C, MODULES)
            expert = tl.load(described + position * 4 + 3)
            first_entry = entry_of(slot, expert, 0, slot_stride, table_base, MODULES)
            entry = first_entry + module
            rank = rank_of(tables, entry, min_rank, max_rank)
            first = first_with_same_a(tables, first_entry, module, MODULES)
            h_row = h + (first * num_rows + position).to(tl.int64) * h_width
            split_stride = (MODULES * num_rows).to(tl.int64) * h_width
            c = c0 + tl.arange(0, BLOCK_C)
            products = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            for r0 in tl.range(0, padded_rank if PADDED else rank, BLOCK_R, num_stages=STAGES):
                r = r0 + tl.arange(0, BLOCK_R)
                b_RC = _weights(tables, tables.b_offset, entry, r, c, rank, width, arena_bytes, x, PADDED)
                h_R = tl.load(h_row + r, mask=r < rank, other=0.0)
                for split in tl.static_range(1, SPLIT_K):
                    h_R += tl.load(h_row + split * split_stride + r, mask=r < rank, other=0.0)
                products += b_RC * h_R[:, None]
            if rank > 0:
                y_row = y + tl.load(rows + position).to(tl.int64) * y_stride + base
                scale = tl.load(tables.scale + entry)
                delta = tl.sum(products, axis=0)
                before = tl.zeros((BLOCK_C,), y.dtype.element_ty)
                if ADD:
                    before = tl.load(y_row + c, mask=c < width, other=0.0)
                result = add_delta(before, delta, scale, ADD, SUBTRACT, INTERPRETED)
                tl.store(y_row + c, result, mask=c < width)
