# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of paged attention.

Legend: N heads, G heads of a kv head, D head_dim, P parts.  A program of `attend` holds consecutive rows of a
sequence times the G heads of a kv head (GQA packing), and walks over key blocks at multiples of BLOCK_N
(online softmax, fp32, base 2).  Invisible blocks leave sums unchanged: a row depends on its own sequence
alone.
Source: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding (parts), PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import wait_for_kernel_before

_LOG2_E = tl.constexpr(1.4426950408889634)
_SEQUENCES = tl.constexpr(128)
_NUMBERS = ("window", "num_seqs", "table_stride")
"""Numbers that must not trigger a compilation."""


@triton.jit
def sequence_of(item, query_start, num_seqs, ROWS: tl.constexpr):
    """The sequence of tile `item`: the last with query_start // ROWS + number <= item.

    With ROWS 0, the sequence of row `item`.
    """
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start + middle)
        if ROWS > 0:
            first = first // ROWS + middle
        if first <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _first_key(seq_len, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    if HAS_WINDOW:
        return tl.maximum(seq_len - window, 0) // BLOCK_N * BLOCK_N
    return seq_len * 0


@triton.jit
def _num_parts(
    seq,
    num_seqs,
    query_start,
    seq_lens,
    window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
):
    """Parts of each sequence of one row; else 0."""
    inside = seq < num_seqs
    start = tl.load(query_start + seq, mask=inside, other=0)
    rows = tl.load(query_start + seq + 1, mask=inside, other=0) - start
    seq_len = tl.load(seq_lens + seq, mask=inside, other=0)
    parts = tl.cdiv(seq_len - _first_key(seq_len, window, HAS_WINDOW, BLOCK_N), PART)
    return tl.where(rows == 1, tl.maximum(parts, 1), 0)


@triton.jit
def _sequence_and_part(
    place,
    num_seqs,
    query_start,
    seq_lens,
    window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
):
    """The sequence (num_seqs: none) and the part at `place` among all parts."""
    seq, begin, total = 0, 0, 0
    for first in tl.range(0, num_seqs, _SEQUENCES):
        one = first + tl.arange(0, _SEQUENCES)
        parts = _num_parts(one, num_seqs, query_start, seq_lens, window, HAS_WINDOW, BLOCK_N, PART)
        end = total + tl.cumsum(parts, axis=0)
        before = (end <= place) & (one < num_seqs)
        seq += tl.sum(before.to(tl.int32), axis=0)
        begin = tl.maximum(begin, tl.max(tl.where(before, end, 0), axis=0))
        total += tl.sum(parts, axis=0)
    return seq, place - begin


@triton.jit
def _product(a, b, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # see `entries.dot`
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _walk(
    first,
    last,
    sums_so_far,
    q_MD,
    keys,
    values,
    table,
    position,
    end,
    factor,
    window,
    page_stride,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Maximum, sum and products of a tile's rows after the keys from `first` to `last`.

    MASKED: some row does not see all keys; bits of further rows stay.  factor: in base 2.
    """
    top, total, acc_MD = sums_so_far
    column = tl.arange(0, acc_MD.shape[1])
    in_head = column < HEAD_DIM
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < end
        page = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = page * page_stride + key % BLOCK_SIZE * HEAD_DIM
        k_at, v_at = keys + at[None, :] + column[:, None], values + at[:, None] + column[None, :]
        k_mask, v_mask = inside[None, :], inside[:, None]
        if acc_MD.shape[1] != HEAD_DIM:
            k_mask, v_mask = k_mask & in_head[:, None], v_mask & in_head[None, :]
        if MASKED or acc_MD.shape[1] != HEAD_DIM:
            k_DN = tl.load(k_at, mask=k_mask, other=0.0)
        else:
            k_DN = tl.load(k_at)
        logits = _product(q_MD, k_DN, INTERPRETED)
        if MASKED:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1) * factor)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p_MN = tl.exp2(logits * factor - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p_MN, 1)
        if MASKED or acc_MD.shape[1] != HEAD_DIM:
            v_ND = tl.load(v_at, mask=v_mask, other=0.0)
        else:
            v_ND = tl.load(v_at)
        acc_MD = acc_MD * fade[:, None] + _product(p_MN.to(q_MD.dtype), v_ND, INTERPRETED)
        top = higher
    return top, total, acc_MD


@triton.jit(do_not_specialize=_NUMBERS)
def attend(
    q,
    pages,
    out,
    sinks,
    sums,
    weights,
    query_start,
    seq_lens,
    block_tables,
    scale,
    window,
    num_seqs,
    table_stride,
    page_stride,
    key_start,
    value_start,
    q_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = softmax(scale * q @ K.T) @ V of a tile, or the sums of a part.

    SINGLE: a program per part of a sequence of one row and kv head; else per tile of ROWS rows and kv head,
    for sequences of several rows.  Several parts leave sums [P, N, D] and weights [P, N, 2] (maximum, sum).
    """
    if DEPENDENT:
        wait_for_kernel_before()
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    part = 0
    if SINGLE:
        seq, part = _sequence_and_part(
            tile, num_seqs, query_start, seq_lens, window, HAS_WINDOW, BLOCK_N, PART
        )
        if seq >= num_seqs:
            return
    else:
        seq = sequence_of(tile, query_start, num_seqs, ROWS)
    first_row = tl.load(query_start + seq)
    num_rows = tl.load(query_start + seq + 1) - first_row
    seq_len = tl.load(seq_lens + seq)
    tile_row = 0
    if not SINGLE:
        tile_row = (tile - first_row // ROWS - seq) * ROWS
        if (num_rows <= 1) | (tile_row >= num_rows):
            return

    packed = tl.arange(0, BLOCK_M)
    row = tile_row + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    live = (packed < ROWS * GROUP) & (row < num_rows)
    position = seq_len - num_rows + row
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    q_at = (first_row + row).to(tl.int64) * q_row + head * HEAD_DIM
    q_MD = tl.load(q + q_at[:, None] + column[None, :], mask=live[:, None] & in_head[None, :], other=0.0)

    end = tl.minimum(seq_len - num_rows + tile_row + ROWS, seq_len)
    first = _first_key(seq_len - num_rows + tile_row + 1, window, HAS_WINDOW, BLOCK_N)
    parted = False
    if SINGLE:
        parted = end - first > PART
        first += part * PART
        end = tl.minimum(end, first + PART)
        if first >= end + (seq_len == 0):
            return
    head_start = kv_head * (BLOCK_SIZE * HEAD_DIM)
    keys, values = pages + key_start + head_start, pages + value_start + head_start
    table = block_tables + seq.to(tl.int64) * table_stride

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    sums_so_far = (top, total, acc_MD)
    about = (q_MD, keys, values, table, position, end, scale * _LOG2_E, window, page_stride)
    seen_by_all = first
    if not (SINGLE or HAS_WINDOW):
        seen_by_all = tl.maximum((seq_len - num_rows + tile_row + 1) // BLOCK_N * BLOCK_N, first)
        sums_so_far = _walk(
            first,
            seen_by_all,
            sums_so_far,
            *about,
            False,
            False,
            HEAD_DIM,
            BLOCK_SIZE,
            INTERPRETED,
            BLOCK_N,
            STAGES,
        )
    top, total, acc_MD = _walk(
        seen_by_all,
        end,
        sums_so_far,
        *about,
        True,
        HAS_WINDOW,
        HEAD_DIM,
        BLOCK_SIZE,
        INTERPRETED,
        BLOCK_N,
        STAGES,
    )

    if parted:
        place = tile.to(tl.int64) * (KV_HEADS * GROUP) + head
        mask = live[:, None] & in_head[None, :]
        tl.store(sums + place[:, None] * HEAD_DIM + column[None, :], acc_MD, mask=mask)
        tl.store(weights + place * 2, top, mask=live)
        tl.store(weights + place * 2 + 1, total, mask=live)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * _LOG2_E
            higher = tl.maximum(top, sink)
            fade = tl.exp2(top - higher)
            total = total * fade + tl.exp2(sink - higher)
            acc_MD = acc_MD * fade[:, None]
        result = acc_MD / tl.where(total > 0, total, 1.0)[:, None]
        out_at = (first_row + row).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
        mask = live[:, None] & in_head[None, :]
        tl.store(out + out_at[:, None] + column[None, :], result.to(q_MD.dtype), mask=mask)


@triton.jit(do_not_specialize=_NUMBERS)
def join_parts(
    sums,
    weights,
    out,
    sinks,
    query_start,
    seq_lens,
    window,
    num_seqs,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out of a head of a sequence of one row: its parts, in order."""
    if DEPENDENT:
        wait_for_kernel_before()
    seq, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row = tl.load(query_start + seq)
    if tl.load(query_start + seq + 1) - row != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    own_parts = tl.cdiv(seq_len - _first_key(seq_len, window, HAS_WINDOW, BLOCK_N), PART)
    if own_parts <= 1:
        return
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    first = 0
    for start in tl.range(0, seq, _SEQUENCES):
        one = start + tl.arange(0, _SEQUENCES)
        first += tl.sum(
            _num_parts(one, seq, query_start, seq_lens, window, HAS_WINDOW, BLOCK_N, PART), axis=0
        )
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if HAS_SINKS:
        top = tl.zeros_like(top) + tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total += 1.0
    acc_D = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, own_parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        inside = part < own_parts
        place = (first + part).to(tl.int64) * HEADS + head
        part_top = tl.load(weights + place * 2, mask=inside, other=float("-inf"))
        part_total = tl.load(weights + place * 2 + 1, mask=inside, other=0.0)
        at = place[:, None] * HEAD_DIM + column[None, :]
        part_sums = tl.load(sums + at, mask=inside[:, None] & in_head[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(part_top, 0))
        fade, part_fade = tl.exp2(top - higher), tl.exp2(part_top - higher)
        total = total * fade + tl.sum(part_total * part_fade, 0)
        acc_D = acc_D * fade + tl.sum(part_sums * part_fade[:, None], 0)
        top = higher
    result = acc_D / tl.where(total > 0, total, 1.0)
    tl.store(out + row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + column, result, mask=in_head)
