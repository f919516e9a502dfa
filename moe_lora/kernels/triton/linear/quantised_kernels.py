# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of linear layers over quantised weights.

Legend: see `experts`; S separate sums over the inputs.  PACKED: two values of 4 bits in a byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import dot, rounded


@triton.jit
def inputs_of(byte, part, PACKED: tl.constexpr):
    """Input indices of a row's bytes; part: 0: lower half of a byte, 1: upper."""
    if PACKED:
        return byte // 32 * 64 + byte % 32 + 32 * part
    return byte


@triton.jit
def bf16_of(bits, INTERPRETED: tl.constexpr):
    """The bf16 numbers of these bits, int32; fp32 in the interpreter."""
    if INTERPRETED:
        return (bits << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def values_of(stored, part: tl.constexpr, NAME: tl.constexpr, INTERPRETED: tl.constexpr):
    """Exact values before zero and scale: fp32, or bf16 for 4 bits.

    4-bit codes go into the bits of bf16 numbers.
    """
    if NAME == "int8":
        values = stored.to(tl.float32)
    elif NAME == "fp8":
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = stored.to(tl.int32) >> (4 * part)
        if NAME == "int4":  # 128 + code, less 128 and the code of 0
            values = bf16_of((code & 15) | 0x4300, INTERPRETED) - 136.0
        else:  # sign, exponent and mantissa of E2M1: smaller by 2**126, the difference of the biases
            values = bf16_of(((code & 8) << 12) | ((code & 7) << 6), INTERPRETED) * 2.0**126
    return values


@triton.jit
def scales_of(stored, NAME: tl.constexpr, INTERPRETED: tl.constexpr):
    """Scales as fp32; mxfp4's are exponents, E8M0."""
    if NAME == "mxfp4":
        stored = bf16_of(tl.maximum(stored.to(tl.int32) << 7, 64), INTERPRETED)
    return stored.to(tl.float32)


@triton.jit
def weight_tile(
    weight,
    matrix,
    n,
    stored,
    first_byte,
    part: tl.constexpr,
    num_out,
    width,
    NAME: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """scale * (q - zero) of outputs n and the inputs of some bytes, fp32 [n, bytes].

    stored: [n, bytes] of a matrix, from first_byte on.  ONE_GROUP: the inputs share a scale.
    """
    values = values_of(stored, part, NAME, INTERPRETED)
    num_groups, group = 1, 0
    if GROUP > 0:
        num_groups = tl.cdiv(width, GROUP)
        byte = first_byte
        if not ONE_GROUP:
            byte += tl.arange(0, stored.shape[1])[None, :]
        group = tl.minimum(inputs_of(byte, part, PACKED) // GROUP, num_groups - 1)
    row = matrix.to(tl.int64) * tl.cdiv(num_out, ROW_GROUP) + n[:, None] // ROW_GROUP
    scale = scales_of(tl.load(weight.scale + row * num_groups + group), NAME, INTERPRETED)
    if HAS_ZERO:
        row = matrix.to(tl.int64) * num_out + n[:, None]
        values -= tl.load(weight.zero + row * num_groups + group).to(values.dtype)
    return values.to(tl.float32) * scale


@triton.jit(do_not_specialize=("num_rows",))
def quantised_tiles(
    x,
    weight,
    bias,
    rows,
    tiles,
    out,
    num_rows,
    num_out,
    width,
    x_stride,
    X_DIVISOR: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NAME: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    APART: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[row] = x[row / X_DIVISOR] @ weight.T + bias, or with APART out[s, row] = part s of the product.

    x: [., H].  out: [R, N] of x's dtype; APART: fp32 [S, R, N].  An item is a tile of rows, a block of
    outputs, and a part if APART.
    """
    dtype = x.dtype.element_ty
    row_bytes = tl.cdiv(width, 64) * 32 if PACKED else width
    steps = tl.cdiv(tl.cdiv(row_bytes, BLOCK_B), SPLIT_K)
    num_tiles = tl.load(tiles.num) if HAS_IDS else tl.cdiv(num_rows, BLOCK_T)
    num_items = num_tiles * tl.cdiv(num_out, BLOCK_N) * (SPLIT_K if APART else 1)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = item // num_tiles
        first_part = block % SPLIT_K if APART else 0
        n = (block // SPLIT_K if APART else block) * BLOCK_N + tl.arange(0, BLOCK_N)
        held_n = tl.minimum(n, num_out - 1)
        position = (item % num_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside, row, matrix = position < num_rows, position, num_rows * 0
        if HAS_IDS:
            described = tiles.table + (item % num_tiles) * 4
            position = tl.load(described) + tl.arange(0, BLOCK_T)
            inside, matrix = position < tl.load(described + 1), tl.load(described + 3)
            row = tl.load(rows + position, mask=inside, other=0)
        x_rows = x + (row // X_DIVISOR).to(tl.int64)[:, None] * x_stride
        data_rows = weight.data + (matrix.to(tl.int64) * num_out + held_n)[:, None] * row_bytes
        total_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for split in tl.range(first_part, first_part + (1 if APART else SPLIT_K)):
            sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
                first_byte = step * BLOCK_B
                byte = first_byte + tl.arange(0, BLOCK_B)
                stored = tl.load(data_rows + byte[None, :], mask=(byte < row_bytes)[None, :], other=0)
                for part in tl.static_range(2 if PACKED else 1):
                    w_NK = weight_tile(
                        weight,
                        matrix,
                        held_n,
                        stored,
                        first_byte,
                        part,
                        num_out,
                        width,
                        NAME,
                        GROUP,
                        ROW_GROUP,
                        HAS_ZERO,
                        PACKED,
                        ONE_GROUP,
                        INTERPRETED,
                    )
                    k = inputs_of(byte, part, PACKED)
                    x_mask = inside[:, None] & (k < width)[None, :]
                    x_TK = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
                    sum_NT = dot(rounded(w_NK, dtype, INTERPRETED), tl.trans(x_TK), sum_NT, INTERPRETED)
            total_NT += sum_NT
        mask = (n < num_out)[:, None] & inside[None, :]
        if APART:
            out_row = (block % SPLIT_K).to(tl.int64) * num_rows + row
            tl.store(out + out_row[None, :] * num_out + n[:, None], total_NT, mask=mask)
        else:
            if HAS_BIAS:
                total_NT += tl.load(bias + matrix.to(tl.int64) * num_out + held_n).to(tl.float32)[:, None]
            y_NT = rounded(total_NT, dtype, INTERPRETED)
            tl.store(out + row.to(tl.int64)[None, :] * num_out + n[:, None], y_NT, mask=mask)


@triton.jit(do_not_specialize=("num_rows",))
def join_parts(
    parts,
    bias,
    ids,
    out,
    num_rows,
    num_out,
    num_experts,
    HAS_IDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[row] = sum over s of parts[s, row], in order, + bias; zero without an expert.

    parts: fp32 [S, R, N].
    """
    blocks = tl.cdiv(num_out, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix = tl.load(ids + row).to(tl.int64) if HAS_IDS else row * 0
    mask = n < tl.where((matrix >= 0) & (matrix < num_experts), num_out, 0)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(parts + (split * num_rows + row) * num_out + n, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + matrix * num_out + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * num_out + n, rounded(total, out.dtype.element_ty, INTERPRETED), mask=n < num_out)
