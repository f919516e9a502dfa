# SPDX-License-Identifier: Apache-2.0
"""Access to the slot table's entry of a (slot, layer, module, expert).

tables: `problem.Tables`, [N, L, X] each.  slot_stride: L * X.  table_base: layer * X + the site's first
entry.  widths: of three modules, 0 if absent.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOT_SPECIALIZED = (
    *("arena_bytes", "slot_stride", "table_base", "min_rank", "max_rank", "padded_rank"),
    *("lanes", "num_rows"),
)
"""Numbers that must not trigger a compilation; in a tuple they would."""


@triton.jit
def wait_for_kernel_before():
    """Wait for the previous kernel's writes; then the next kernel may start.

    First call in a kernel of `configs.DEPENDENT`.
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def entry_of(slot, expert, module, slot_stride, table_base, MODULES: tl.constexpr):
    """Flat index in the slot table."""
    return slot.to(tl.int64) * slot_stride + table_base + expert * MODULES + module


@triton.jit
def rank_of(tables, entry, min_rank, max_rank):
    """The entry's true rank, 0 outside this launch's ranks."""
    rank = tl.load(tables.lora_rank + entry)
    return tl.where((rank >= min_rank) & (rank <= max_rank), rank, 0)


@triton.jit
def first_with_same_a(tables, first_entry, module, MODULES: tl.constexpr):
    """First module with the same A: only its h is computed."""
    offset = tl.load(tables.a_offset + first_entry + module)
    rank = tl.load(tables.lora_rank + first_entry + module)
    first = module
    for other in tl.static_range(MODULES - 1):
        same = tl.load(tables.a_offset + first_entry + other) == offset
        same = same & (tl.load(tables.lora_rank + first_entry + other) == rank) & (other < first)
        first = tl.where(same, other, first)
    return first


@triton.jit
def matrix(arena, offsets, entry, DTYPE: tl.constexpr):
    """Pointer to a packed matrix, at a multiple of 64 bytes."""
    offset = tl.multiple_of(tl.load(offsets + entry), 64)
    return (arena + offset).to(tl.pointer_type(DTYPE))


@triton.jit
def module_of_block(block, widths, BLOCK_C: tl.constexpr, MODULES: tl.constexpr):
    """(module, first column in it, module width, module's first column in y) of a block."""
    # Selects, not branches: the compiler then keeps the alignment of 16.
    first1 = tl.cdiv(widths[0], BLOCK_C)
    first2 = first1 + tl.cdiv(widths[1], BLOCK_C)
    module = tl.minimum((block >= first1).to(tl.int32) + (block >= first2).to(tl.int32), MODULES - 1)
    first = tl.where(module == 0, 0, tl.where(module == 1, first1, first2))
    width = tl.where(module == 0, widths[0], tl.where(module == 1, widths[1], widths[2]))
    base = tl.where(module == 0, 0, tl.where(module == 1, widths[0], widths[0] + widths[1]))
    return module, (block - first) * BLOCK_C, width, base


@triton.jit
def num_blocks(widths, BLOCK_C: tl.constexpr):
    """Blocks of output columns of all modules."""
    return tl.cdiv(widths[0], BLOCK_C) + tl.cdiv(widths[1], BLOCK_C) + tl.cdiv(widths[2], BLOCK_C)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b in fp32.  (The interpreter's product of bf16 tiles is wrong.)"""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(values, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 values rounded to nearest even; the interpreter does not round bf16 by itself."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        values = bits.to(tl.float32, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def add_delta(before, total, scale, ADD: tl.constexpr, SUBTRACT: tl.constexpr, INTERPRETED: tl.constexpr):
    """round(before + round(scale * total)) if ADD, before - ... if SUBTRACT too, else round(scale * total).

    before: its dtype sets the rounding: in fp32 deltas stay unrounded.
    """
    dtype = before.dtype
    delta = rounded(total * (-scale if SUBTRACT else scale), dtype, INTERPRETED)
    if ADD:
        delta = rounded(before.to(tl.float32) + delta.to(tl.float32), dtype, INTERPRETED)
    return delta
