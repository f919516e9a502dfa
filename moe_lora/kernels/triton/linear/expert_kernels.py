# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of experts.  Legend: see `experts`.

Tiles add along H in the same steps of the same instruction, for equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import dot, entry_of, rounded, wait_for_kernel_before
from moe_lora.kernels.triton.lora.segment_kernels import sort_block


@triton.jit
def _in_best_groups(ranked_E, e, num_experts, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """[EXPERTS] bool: experts of the TOP_GROUPS groups of largest sums of two scores."""
    lowest = -float("inf")
    group_E = e // (num_experts // GROUPS)
    sum_E = tl.where(e < num_experts, lowest, lowest)
    for group in tl.static_range(GROUPS):
        here_E = group_E == group
        first = tl.max(tl.where(here_E, ranked_E, lowest), axis=0)
        place = tl.min(tl.where(here_E & (ranked_E == first), e, num_experts), axis=0)
        second = tl.max(tl.where(here_E & (e != place), ranked_E, lowest), axis=0)
        sum_E = tl.where(here_E, first + second, sum_E)
    left_E, kept_E = e < num_experts, e < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(left_E, sum_E, lowest), axis=0)
        group = tl.min(tl.where(left_E & (sum_E == best), group_E, GROUPS), axis=0)
        kept_E = kept_E | (group_E == group)
        left_E = left_E & (group_E != group)
    return kept_E & (e < num_experts)


@triton.jit
def _choose(
    token,
    logits,
    live,
    weights,
    ids,
    correction,
    num_experts,
    power,
    scale,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    NORM: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A token's TOP_K experts, ascending, and weights: see `experts.choose`.

    SCORES: 0 logits, 1 softmax, 2 sigmoids.
    """
    e = tl.arange(0, EXPERTS)
    logit_E = tl.load(logits + token * num_experts + e, mask=e < num_experts, other=-float("inf")).to(
        tl.float32
    )
    logit_E = tl.where(logit_E == logit_E, logit_E, -float("inf"))
    largest = tl.maximum(tl.max(logit_E, axis=0), -3e38)
    exp_E = tl.exp(logit_E - largest)
    score_E = logit_E
    if SCORES == 1:
        score_E = exp_E / tl.sum(exp_E, axis=0)
    if SCORES == 2:
        score_E = 1.0 / (1.0 + tl.exp(-logit_E))
    score_E = tl.where(score_E == score_E, score_E, 0.0)
    ranked_E = score_E
    if CORRECTED:
        ranked_E += tl.load(correction + e, mask=e < num_experts, other=0.0)
    open_E = e < num_experts
    if GROUPS > 1:
        open_E = _in_best_groups(ranked_E, e, num_experts, GROUPS, TOP_GROUPS)
    left_E = open_E
    for _ in tl.static_range(TOP_K):
        best = tl.max(tl.where(left_E, ranked_E, -float("inf")), axis=0)
        first = tl.min(tl.where(left_E & (ranked_E == best), e, EXPERTS), axis=0)
        left_E = left_E & (e != first)
    chosen_E = open_E & (left_E == 0)
    kept_E = tl.where(chosen_E, score_E if SCORES else exp_E, 0.0)
    if NORM == 1:
        kept_E = kept_E / (tl.sum(kept_E, axis=0) + 1e-20)  # chosen sigmoids may all be 0
    if NORM == 2:
        powers_E = tl.where(chosen_E, tl.exp2(tl.log2(kept_E) * power), 0.0)
        kept_E = kept_E / tl.exp2(tl.log2(tl.sum(powers_E, axis=0)) / power)
    kept_E = kept_E * scale
    place_E = token * TOP_K + tl.cumsum(chosen_E.to(tl.int32), axis=0) - 1
    tl.store(weights + place_E, kept_E, mask=chosen_E)
    is_live = tl.load(live + token) != 0
    tl.store(ids + place_E, tl.where(is_live, e, -1), mask=chosen_E)


@triton.jit(do_not_specialize=("power", "scale"))
def choose_experts(
    logits,
    live,
    weights,
    ids,
    correction,
    num_experts,
    power,
    scale,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    NORM: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """`_choose`, a program per token."""
    token = tl.program_id(0)
    _choose(
        token,
        logits,
        live,
        weights,
        ids,
        correction,
        num_experts,
        power,
        scale,
        TOP_K,
        SCORES,
        NORM,
        CORRECTED,
        GROUPS,
        TOP_GROUPS,
        EXPERTS,
    )


@triton.jit
def _expert_of(ids, row, num_rows, first, num_experts):
    """Each row's expert, from `first`; E without an expert, E + 1 past the last row."""
    expert = tl.load(ids + row, mask=row < num_rows, other=-1)
    expert = tl.where((expert >= first) & (expert < first + num_experts), expert - first, num_experts)
    return tl.where(row < num_rows, expert, num_experts + 1)


@triton.jit
def _order(mine, ids, order, num_rows, first, num_experts, BLOCK: tl.constexpr):
    place = 0
    for start in tl.range(0, num_rows, BLOCK):
        expert = _expert_of(ids, start + tl.arange(0, BLOCK), num_rows, first, num_experts)
        place += tl.sum((expert < mine).to(tl.int32), axis=0)
    tl.store(order + mine, place)
    if mine == num_experts:
        tl.store(order + num_experts + 1, num_rows)
    rows = order + num_experts + 2
    for start in tl.range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        here = _expert_of(ids, row, num_rows, first, num_experts) == mine
        tl.store(rows + place + tl.cumsum(here.to(tl.int32), axis=0) - 1, row, mask=here)
        place += tl.sum(here.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=("num_rows", "first"))
def order_rows(ids, order, num_rows, first, num_experts, BLOCK: tl.constexpr):
    """order: first position of each expert's rows, of rows without expert, and R; then each position's row.

    [E + 2 + R], stable.  first: number of the first expert.  A program per expert, and one for the rest.
    """
    _order(tl.program_id(0), ids, order, num_rows, first, num_experts, BLOCK)


@triton.jit
def _all_chosen(chosen, num_tokens, INTERPRETED: tl.constexpr):
    """Wait for `num_tokens` programs; their writes are then visible."""
    seen = tl.atomic_add(chosen, 0, sem="acquire")
    if INTERPRETED:
        tl.device_assert(seen == num_tokens, "programs run one after the other")
    else:
        while seen < num_tokens:
            seen = tl.atomic_add(chosen, 0, sem="acquire")


@triton.jit(
    do_not_specialize=(
        "power",
        "scale",
        "num_tokens",
        "first",
        "ordered",
        "num_slots",
        "of_model",
        "tile_rows",
    )
)
def choose_and_order(
    logits,
    live,
    weights,
    ids,
    correction,
    order,
    to_sort,
    counters,
    num_tokens,
    num_experts,
    power,
    scale,
    first,
    num_held,
    ordered,
    num_slots,
    of_model,
    tile_rows,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    NORM: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SORTS: tl.constexpr,
    CUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SORTED: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`choose_experts`; then `order_rows` if `ordered` is E + 1, and `segment_kernels.sort_rows` if SORTS.

    An item per program: tokens, then experts of the order, then blocks of rows to sort.  The last wait for
    all tokens without deadlock: programs take items in order, so a token is done or at a running program.
    counters: [2] int32, zeros.  first, num_held: ordered experts.
    """
    if DEPENDENT:
        wait_for_kernel_before()
    num_rows = num_tokens * TOP_K
    item = tl.atomic_add(counters, 1, sem="relaxed")
    if item < num_tokens:
        _choose(
            item,
            logits,
            live,
            weights,
            ids,
            correction,
            num_experts,
            power,
            scale,
            TOP_K,
            SCORES,
            NORM,
            CORRECTED,
            GROUPS,
            TOP_GROUPS,
            EXPERTS,
        )
        tl.debug_barrier()
        tl.atomic_add(counters + 1, 1, sem="release")
    else:
        _all_chosen(counters + 1, num_tokens, INTERPRETED)
        if item < num_tokens + ordered:
            _order(item - num_tokens, ids, order, num_rows, first, num_held, BLOCK)
        elif SORTS:
            sort_block(
                item - num_tokens - ordered,
                tl.cdiv(num_rows, BLOCK_SORTED),
                to_sort[0],
                ids,
                to_sort[1],
                to_sort[2],
                to_sort[3],
                to_sort[4],
                to_sort[5],
                to_sort[6],
                num_rows,
                num_slots,
                of_model,
                tile_rows,
                TOP_K,
                True,
                CUT,
                BLOCK_SORTED,
                BLOCK_OTHER,
                BLOCK,
            )


@triton.jit
def gated(gate, up, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up, or GPT-OSS's clamped form; fp32."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def ends_of_tiles(order, num_experts, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Start and end of experts' rows, and running number of tiles; expert E: rows without expert."""
    e = tl.arange(0, EXPERTS)
    begin_E = tl.load(order + e, mask=e <= num_experts, other=0)
    end_E = tl.load(order + e + 1, mask=e <= num_experts, other=0)
    return begin_E, end_E, tl.cumsum(tl.cdiv(end_E - begin_E, BLOCK_T), axis=0)


@triton.jit
def tile_and_block(item, num_tiles, blocks, GROUP: tl.constexpr):
    """GROUP adjacent tiles walk the column blocks together, to share weights."""
    group = item // (GROUP * blocks)
    size = tl.minimum(num_tiles - group * GROUP, GROUP)
    within = item - group * GROUP * blocks
    return group * GROUP + within % size, within // size


@triton.jit
def rows_of_tile(
    tile,
    ids,
    order,
    begin_E,
    end_E,
    tiles_E,
    num_rows,
    num_experts,
    SORTED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """(expert, rows [BLOCK_T], mask of own rows).  Not SORTED: a tile is one row."""
    t = tl.arange(0, BLOCK_T)
    if SORTED:
        e = tl.arange(0, EXPERTS)
        expert = tl.sum((tiles_E <= tile).to(tl.int32), axis=0)
        tiles_before = tl.max(tl.where(e < expert, tiles_E, 0), axis=0)
        position = tl.sum(tl.where(e == expert, begin_E, 0), axis=0) + (tile - tiles_before) * BLOCK_T + t
        inside = position < tl.sum(tl.where(e == expert, end_E, 0), axis=0)
        row = tl.load(order + num_experts + 2 + position, mask=inside, other=0)
    else:
        expert = _expert_of(ids, tile, num_rows, 0, num_experts)
        inside = t == 0
        row = tile + tl.zeros_like(t)
    return expert, row, inside


@triton.jit
def _with_deltas(
    y_NT,
    deltas,
    token_slots,
    lora_rank,
    slot_stride,
    table_base,
    half,
    expert,
    row,
    inside,
    n,
    columns,
    ROWS_PER_INPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """round(y + delta) of a tile's rows in columns n, [n, rows], in fp32; y without a delta."""
    slot_T = tl.load(token_slots + row // ROWS_PER_INPUT, mask=inside, other=-1)
    entry_T = entry_of(slot_T, expert, half, slot_stride, table_base, 2)
    rank_T = tl.load(lora_rank + entry_T, mask=slot_T >= 0, other=0)
    has_NT = (rank_T > 0)[None, :] & (n < columns)[:, None]
    pointers = deltas + (row.to(tl.int64) * 2 + half)[None, :] * columns + n[:, None]
    delta_NT = tl.load(pointers, mask=has_NT, other=0.0)
    total_NT = rounded(y_NT + delta_NT.to(tl.float32), deltas.dtype.element_ty, INTERPRETED)
    return tl.where(has_NT, total_NT.to(tl.float32), y_NT)


@triton.jit(do_not_specialize=("num_rows", "limit", "slot_stride", "table_base"))
def expert_linear(
    x,
    weight,
    bias,
    ids,
    order,
    y,
    deltas,
    token_slots,
    lora_rank,
    slot_stride,
    table_base,
    num_rows,
    num_experts,
    out_width,
    width,
    limit,
    ROWS_PER_INPUT: tl.constexpr,
    SORTED: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DELTAS: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[row] = x[row / ROWS_PER_INPUT] @ weight[expert].T + bias[expert], zero without an expert.

    GATED: then `gated` of the two halves of N, each rounded before, and again after deltas.
    x: [R / ROWS_PER_INPUT, H].  weight: [E, N, H].  y: [R, N], or [R, N / 2] if GATED.  EVEN: BLOCK_K
    divides H.
    """
    if DEPENDENT:
        wait_for_kernel_before()
    columns = out_width // 2 if GATED else out_width
    blocks = tl.cdiv(columns, BLOCK_N)
    begin_E, end_E, tiles_E = 0, 0, 0
    num_tiles = num_rows
    if SORTED:
        begin_E, end_E, tiles_E = ends_of_tiles(order, num_experts, EXPERTS, BLOCK_T)
        num_tiles = tl.max(tiles_E, axis=0)
    for item in tl.range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        tile, block = tile_and_block(item, num_tiles, blocks, GROUP)
        expert, row, inside = rows_of_tile(
            tile, ids, order, begin_E, end_E, tiles_E, num_rows, num_experts, SORTED, EXPERTS, BLOCK_T
        )
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        y_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        if expert < num_experts:
            # Without a mask past the last row, except in small tiles: all programs would read row 0.
            first = (expert.to(tl.int64) * out_width).to(tl.int64) * width
            w_rows = weight + first + tl.minimum(n, columns - 1)[:, None].to(tl.int64) * width
            x_rows = x + (row // ROWS_PER_INPUT)[:, None].to(tl.int64) * width
            up_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for k0 in tl.range(0, width, BLOCK_K, num_stages=STAGES):
                k = k0 + tl.arange(0, BLOCK_K)[None, :]
                if EVEN:
                    x_TK = tl.load(x_rows + k) if BLOCK_T > 64 else tl.load(x_rows + k, inside[:, None], 0.0)
                    w_NK = tl.load(w_rows + k)
                else:
                    x_TK = tl.load(x_rows + k, mask=k < width, other=0.0)
                    w_NK = tl.load(w_rows + k, mask=k < width, other=0.0)
                y_NT = dot(w_NK, tl.trans(x_TK), y_NT, INTERPRETED)
                if GATED:
                    u_rows = w_rows + columns * width
                    u_NK = tl.load(u_rows + k) if EVEN else tl.load(u_rows + k, mask=k < width, other=0.0)
                    up_NT = dot(u_NK, tl.trans(x_TK), up_NT, INTERPRETED)
            if HAS_BIAS:
                bias_n = bias + expert * out_width + tl.minimum(n, columns - 1)
                y_NT += tl.load(bias_n).to(tl.float32)[:, None]
                if GATED:
                    up_NT += tl.load(bias_n + columns).to(tl.float32)[:, None]
            if GATED:
                gate_NT = rounded(y_NT, y.dtype.element_ty, INTERPRETED).to(tl.float32)
                up_NT = rounded(up_NT, y.dtype.element_ty, INTERPRETED).to(tl.float32)
                if HAS_DELTAS:
                    about = (deltas, token_slots, lora_rank, slot_stride, table_base)
                    tile_rows = (expert, row, inside, n, columns)
                    gate_NT = _with_deltas(gate_NT, *about, 0, *tile_rows, ROWS_PER_INPUT, INTERPRETED)
                    up_NT = _with_deltas(up_NT, *about, 1, *tile_rows, ROWS_PER_INPUT, INTERPRETED)
                y_NT = gated(gate_NT, up_NT, limit, CLAMPED)
        pointers = y + row[None, :].to(tl.int64) * columns + n[:, None]
        mask_NT = inside[None, :] & (n < columns)[:, None]
        tl.store(pointers, rounded(y_NT, y.dtype.element_ty, INTERPRETED), mask=mask_NT)


@triton.jit(do_not_specialize=("limit",))
def gate_rows(y, out, columns, limit, CLAMPED: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = `gated` of the halves of y[row].  y: [R, 2 * columns], out: [R, columns]."""
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(y + row * 2 * columns + n, mask=n < columns, other=0.0).to(tl.float32)
    up = tl.load(y + (row * 2 + 1) * columns + n, mask=n < columns, other=0.0).to(tl.float32)
    value = rounded(gated(gate, up, limit, CLAMPED), out.dtype.element_ty, INTERPRETED)
    tl.store(out + row * columns + n, value, mask=n < columns)


@triton.jit
def sum_experts(
    y, weights, out, columns, TOP_K: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr
):
    """`reference.sum_experts`.  y: [R, columns], weights: [T, K] fp32."""
    blocks = tl.cdiv(columns, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        value = tl.load(y + (token * TOP_K + k) * columns + n, mask=n < columns, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + token * TOP_K + k)
    tl.store(out + token * columns + n, rounded(total, out.dtype.element_ty, INTERPRETED), mask=n < columns)
