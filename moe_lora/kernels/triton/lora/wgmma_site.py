# SPDX-License-Identifier: Apache-2.0
"""Shrink and expand of a site in one launch, for decode: items of `wgmma_shrink`, then of `wgmma_expand`.

Legend: R rows, C output columns, S separate sums over H, M modules of the site.

A shrink item counts itself with release after its stores, an expand item reads the count with acquire.  Sums
equal the two launches' in order.  No deadlock: programs draw item numbers, shrink before expand, from a
counter, so a waiting item has a number above all shrink items, which wait for nothing.  A fill zeroes the
counters of a step.
Source: the look-back of single-pass scans (Merrill and Garland 2016).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_lora.kernels.triton.entries import NOT_SPECIALIZED, num_blocks, wait_for_kernel_before

from .wgmma_expand import expand_item
from .wgmma_shrink import shrink_item


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def wgmma_site(
    x,
    rows,
    tiles,
    tables,
    h,
    y,
    counters,
    slot_stride,
    table_base,
    min_rank,
    max_rank,
    num_rows,
    lanes,
    width,
    widths,
    x_stride,
    y_stride,
    h_width,
    X_DIVISOR: tl.constexpr,
    MODULES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ONE_LANE: tl.constexpr,
    ADD: tl.constexpr,
    SUBTRACT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCKS_PER_ITEM: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    EXPAND_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[row, columns of module] (+)= the delta of x[row]; h as in `wgmma_shrink`.

    counters: [1 + R * M] int32, zeros: the next item's number, then finished shrink items by tile and module.
    """
    if DEPENDENT:
        wait_for_kernel_before()
    num_tiles = tl.load(tiles.num)
    shrinks = num_tiles * MODULES * SPLIT_K * lanes
    groups = num_blocks(widths, BLOCK_C * BLOCKS_PER_ITEM)
    item = tl.atomic_add(counters, 1, sem="relaxed")
    while item < shrinks + num_tiles * groups:
        if item < shrinks:
            tile_and_module = shrink_item(
                item,
                num_tiles,
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
                width,
                x_stride,
                h_width,
                X_DIVISOR,
                MODULES,
                False,
                EVEN,
                INTERPRETED,
                BLOCK_T,
                BLOCK_K,
                SPLIT_K,
                SHRINK_STAGES,
            )
            tl.debug_barrier()
            tl.atomic_add(counters + 1 + tile_and_module, 1, sem="release")
        else:
            expand_item(
                item - shrinks,
                groups,
                x,
                h,
                rows,
                tiles,
                tables,
                y,
                counters + 1,
                SPLIT_K * lanes,
                slot_stride,
                table_base,
                min_rank,
                max_rank,
                num_rows,
                widths,
                y_stride,
                h_width,
                MODULES,
                SPLIT_K,
                ONE_LANE,
                ADD,
                SUBTRACT,
                False,
                True,
                INTERPRETED,
                BLOCK_T,
                BLOCK_C,
                BLOCKS_PER_ITEM,
                EXPAND_STAGES,
            )
        item = tl.atomic_add(counters, 1, sem="relaxed")
