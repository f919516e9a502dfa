"""SGMV with operands swapped: h.T = A x.T here, delta.T = B h.T in `wgmma_expand`.

Legend: R rows, H input width, C output columns, S parts of H summed apart, M modules of the site.

wgmma's 64 rows are rank rows (or output columns) and its N the tile's tokens, 16 to 64, so that a tile of few
tokens wastes little.  Weights come by TMA: a descriptor per matrix is made on the device from the slot table,
and its bounds make rows past the true rank zeros that are never read.  x is gathered into sorted order first
and comes by TMA too: TMA can't gather on sm_90, and in a warp-specialized loop Triton 3.6 and 3.7 turn loads
by pointer into copies whose end nobody waits for.  They also give the loop two consumers that do the same
work, so what follows such a loop may store a value (the same twice) but must not add to memory: expand is
specialized only where it overwrites.  A persistent grid walks the tiles that `segments` counted.
Rows that are not multiples of 16 bytes can't go by TMA: ALIGNED = False loads them element by element.

Bytes in flight: 4.3 TB/s at about 0.8 us of latency asks for 26 KB per SM.  Shrink in decode keeps 6 stages
of a 64 x 128 two-byte tile, 96 KB per SM; expand keeps 3 stages of 64 x 64, 24 KB of weights and as much
again of h and y.  Splitting H in 4 gives 128 items, about one per SM, for 16 one-row segments of two modules;
as the split fixes the order of sums it must be the same in prefill, where each part's sums are written.
These are reckonings; nothing has been measured on a GPU.

h is kept as a sum of two numbers of the model's dtype (hi + lo, about 16 bits for bf16), so that expand can
use tensor cores and still lose nothing that the delta's rounding would keep.  It is [2, M, R, width] by
sorted position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .entries import NOT_SPECIALIZED, dot, entry_of, first_with_same_a, matrix, rank_of, rounded

BLOCK_R = tl.constexpr(64)


@triton.jit
def put_h(
    h,
    h_T,
    position,
    inside,
    first_row,
    r,
    num_h_rows,
    h_width,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store a [rank rows, tokens] tile as hi (and lo) rows of h."""
    pointers = h + (first_row + position)[None, :].to(tl.int64) * h_width + r[:, None]
    high = rounded(h_T, h.dtype.element_ty, INTERPRETED)
    tl.store(pointers, high, mask=inside[None, :])
    if PARTS == 2:
        low = rounded(h_T - high.to(tl.float32), h.dtype.element_ty, INTERPRETED)
        tl.store(pointers + num_h_rows.to(tl.int64) * h_width, low, mask=inside[None, :])


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def wgmma_shrink(
    x,
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
    h_width,
    MODULES: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """h[position] = x[position] @ A.T: [PARTS, M, R, h_width] of x's dtype, or fp32 [S, M, R, h_width] if S >
    1.

    x: [R, H] in sorted order.  Each item is a tile of tokens, 64 rows of one A, and one of S parts of H.
    """
    steps = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLIT_K)
    if ALIGNED:
        x_tiles = tl.make_tensor_descriptor(x, [num_rows, width], [width, 1], [BLOCK_T, BLOCK_K])
    per_lane = tl.load(tiles.num) * MODULES * SPLIT_K
    h_rows = MODULES * num_rows
    for item in tl.range(tl.program_id(0), per_lane * lanes, tl.num_programs(0)):
        r0 = (item // per_lane) * BLOCK_R
        split = item % SPLIT_K
        module = (item // SPLIT_K) % MODULES
        tile = tiles.table + ((item % per_lane) // (SPLIT_K * MODULES)) * 4
        begin = tl.load(tile)
        position = begin + tl.arange(0, BLOCK_T)
        inside = position < tl.load(tile + 1)
        first_entry = entry_of(tl.load(tile + 2), tl.load(tile + 3), 0, slot_stride, table_base, MODULES)
        rank = rank_of(tables, first_entry + module, min_rank, max_rank)
        first = first_with_same_a(tables, first_entry, module, MODULES)
        if (r0 < rank) & (first == module):
            a = matrix(tables.arena, tables.a_offset, first_entry + module, x.dtype.element_ty)
            r = r0 + tl.arange(0, BLOCK_R)
            h_T = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
            if ALIGNED:
                a_tiles = tl.make_tensor_descriptor(a, [rank, width], [width, 1], [BLOCK_R, BLOCK_K])
            for step in tl.range(0, steps, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
                k0 = (split * steps + step) * BLOCK_K
                if ALIGNED:
                    a_RK = a_tiles.load([r0, k0])
                    x_TK = x_tiles.load([begin, k0])
                else:
                    k = k0 + tl.arange(0, BLOCK_K)
                    mask_RK = (r < rank)[:, None] & (k < width)[None, :]
                    a_RK = tl.load(a + r[:, None] * width + k[None, :], mask=mask_RK, other=0.0)
                    x_rows = x + position[:, None].to(tl.int64) * width
                    x_TK = tl.load(
                        x_rows + k[None, :], mask=inside[:, None] & (k < width)[None, :], other=0.0
                    )
                h_T = dot(a_RK, tl.trans(x_TK), h_T, INTERPRETED)
            h_T = tl.where((r < rank)[:, None], h_T, 0.0)
            first_row = (split * MODULES + module) * num_rows
            put_h(h, h_T, position, inside, first_row, r, h_rows, h_width, PARTS, INTERPRETED)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def join_splits(
    partial,
    tiles,
    tables,
    h,
    slot_stride,
    table_base,
    min_rank,
    max_rank,
    num_rows,
    h_width,
    MODULES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h = sum over s of partial[s], in order of s.  partial: [S, M, R, h_width] fp32, h as
    `wgmma_shrink`'s."""
    total = tl.load(tiles.num) * MODULES
    h_rows = MODULES * num_rows
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        module = item % MODULES
        tile = tiles.table + (item // MODULES) * 4
        position = tl.load(tile) + tl.arange(0, BLOCK_T)
        inside = position < tl.load(tile + 1)
        first_entry = entry_of(tl.load(tile + 2), tl.load(tile + 3), 0, slot_stride, table_base, MODULES)
        rank = rank_of(tables, first_entry + module, min_rank, max_rank)
        if first_with_same_a(tables, first_entry, module, MODULES) == module:
            for r0 in tl.range(0, rank, BLOCK_R):
                r = r0 + tl.arange(0, BLOCK_R)
                h_T = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
                for split in tl.static_range(SPLIT_K):
                    row = (split * MODULES + module) * num_rows + position
                    pointers = partial + row[None, :].to(tl.int64) * h_width + r[:, None]
                    h_T += tl.load(pointers, mask=inside[None, :], other=0.0)
                first_row = module * num_rows
                put_h(h, h_T, position, inside, first_row, r, h_rows, h_width, 2, INTERPRETED)
