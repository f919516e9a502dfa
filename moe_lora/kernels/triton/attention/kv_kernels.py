# SPDX-License-Identifier: Apache-2.0
"""Triton kernel that writes K and V to pages, with rotation.

Legend: see `triton_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import rounded, wait_for_kernel_before

from .attention_kernels import sequence_of


@triton.jit
def _clamped(x, clip, INTERPRETED: tl.constexpr):
    """x clamped to -clip .. clip; NaN stays."""
    wide = x.to(tl.float32)
    wide = tl.where(wide > clip, clip, tl.where(wide < -clip, -clip, wide))
    return rounded(wide, x.dtype, INTERPRETED)


@triton.jit
def _rotated(
    first,
    second,
    low_weight,
    high_weight,
    angle,
    cos,
    sin,
    inside,
    turned,
    eps,
    HEAD_DIM: tl.constexpr,
    NORMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Pairs of numbers of heads: norm over head_dim if NORMS, then rotation; rounded after each.

    first, second: [heads, D / 2].  turned: with rotation.
    """
    dtype = first.dtype
    if NORMS:
        first, second = first.to(tl.float32), second.to(tl.float32)
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        by = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        low = tl.load(low_weight, mask=inside, other=0.0).to(tl.float32)[None, :]
        high = tl.load(high_weight, mask=inside, other=0.0).to(tl.float32)[None, :]
        first = rounded(first * by * low, dtype, INTERPRETED)
        second = rounded(second * by * high, dtype, INTERPRETED)
    first, second = first.to(tl.float32), second.to(tl.float32)
    c = tl.load(cos + angle, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + angle, mask=turned, other=0.0)[None, :]
    low, high = first * c - second * s, second * c + first * s
    return rounded(low, dtype, INTERPRETED), rounded(high, dtype, INTERPRETED)


@triton.jit(do_not_specialize=("num_seqs", "table_stride"))
def write_kv(
    q,
    k,
    v,
    rotated_q,
    pages,
    rotation,
    query_start,
    seq_lens,
    block_tables,
    eps,
    clip,
    num_seqs,
    table_stride,
    page_stride,
    key_start,
    value_start,
    q_row,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED_DIMS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SINGLE: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
    CLIPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write K and V of up to BLOCK_H heads of a row to its page.

    ROTATES: also rotate K, and Q of HEADS heads to rotated_q [T, N, D]; programs of a row: Q, then K, then V.
    SINGLE: every sequence has one row.  ROTATED_DIMS: the first R of D, in pairs of NEIGHBOURS or of halves.
    rotation: cos and sin [T, R / 2], norm weights [D].
    """
    if DEPENDENT:
        wait_for_kernel_before()
    q_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    kv_blocks: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    row = tl.program_id(0) // (q_blocks + 2 * kv_blocks)
    block = tl.program_id(0) % (q_blocks + 2 * kv_blocks)
    is_q, is_v = block < q_blocks, block >= q_blocks + kv_blocks
    seq = row
    if not SINGLE:
        seq = sequence_of(row, query_start, num_seqs, 0)
    seq_len = tl.load(seq_lens + seq)
    if seq_len == 0:
        return
    half: tl.constexpr = (HEAD_DIM + 1) // 2
    angles: tl.constexpr = ROTATED_DIMS // 2
    column = tl.arange(0, BLOCK_D)
    first_at, second_at = column, column + half
    if NEIGHBOURS:
        first_at, second_at = 2 * column, 2 * column + 1
    elif ROTATED_DIMS < HEAD_DIM:  # pairs of rotation are closer; the rest forms pairs behind
        first_at = tl.where(column < angles, column, column + angles)
        second_at = tl.where(column < angles, column + angles, column + half)
    wide_row = row.to(tl.int64)
    source = k + wide_row * k_row
    if is_q:
        source = q + wide_row * q_row
    if is_v:
        source = v + wide_row * v_row
    of_q_or_k = tl.where(is_q, block, block - q_blocks)
    head = tl.where(is_v, of_q_or_k - kv_blocks, of_q_or_k) * BLOCK_H + tl.arange(0, BLOCK_H)
    low = (head < tl.where(is_q, HEADS, KV_HEADS))[:, None] & (column < half)[None, :]
    high = low & (second_at < HEAD_DIM)[None, :]
    at = head[:, None] * HEAD_DIM
    first = tl.load(source + at + first_at[None, :], mask=low, other=0.0)
    second = tl.load(source + at + second_at[None, :], mask=high, other=0.0)
    if CLIPS:
        first, second = _clamped(first, clip, INTERPRETED), _clamped(second, clip, INTERPRETED)
    if ROTATES:  # noqa: SIM102 - known when compiling, is_v is not
        if not is_v:
            weight = rotation[3]
            if is_q:
                weight = rotation[2]
            first, second = _rotated(
                first,
                second,
                weight + first_at,
                weight + second_at,
                wide_row * angles + column,
                rotation[0],
                rotation[1],
                column < half,
                column < angles,
                eps,
                HEAD_DIM,
                NORMS,
                INTERPRETED,
            )
    if is_q:
        target = rotated_q + wide_row * (HEADS * HEAD_DIM) + at
    else:
        position = seq_len - tl.load(query_start + seq + 1) + row
        page = tl.load(block_tables + seq * table_stride + position // BLOCK_SIZE).to(tl.int64)
        place = head[:, None] * (BLOCK_SIZE * HEAD_DIM)
        start = tl.where(is_v, value_start, key_start)
        target = pages + page * page_stride + start + position % BLOCK_SIZE * HEAD_DIM + place
    tl.store(target + first_at[None, :], first, mask=low)
    tl.store(target + second_at[None, :], second, mask=high)
