# SPDX-License-Identifier: Apache-2.0
"""Rows of a step sorted by (expert, adapter), and tiles.  Legend: see `problem`.

Built on the device with host-known sizes: no waits, and graphs can capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from moe_lora.kernels.operands import LoraOperands, Zeros
from moe_lora.kernels.triton import configs

SORT_MAX_ROWS = 4096
"""Above this number of rows `torch.sort` replaces the counting sort."""


class Tiles(NamedTuple):
    """table: [R, 4] int32; the first `num` ([1] int32) rows are (first position, last + 1, slot, expert)."""

    table: torch.Tensor
    num: torch.Tensor


class RowsToSort(NamedTuple):
    """Segments filled by a later launch.

    operands: token_slots, the result's memory, then (num_slots, num_experts, tile_rows).
    """

    segments: Segments
    operands: tuple[Any, ...]
    cuts: bool


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Rows in sorted order, or in the given order."""

    rows: torch.Tensor
    """[R] int32: row at each position; rows with an adapter come first."""
    described: torch.Tensor
    """[R, 4] int32: first and last + 1 position of the segment, slot and expert (-1, -1: none)."""
    count: torch.Tensor
    """[1] int32: rows with an adapter."""
    is_sorted: bool = True
    _tiles: dict[int, Tiles] = field(default_factory=dict)

    def tiles(self, tile_rows: int) -> Tiles:
        """Tiles of at most `tile_rows` rows; made once per size."""
        if tile_rows not in self._tiles:
            operands = (self.described, self.count, *self.new_tiles(tile_rows), tile_rows)
            configs.start(
                configs.kernels("lora.segment_kernels").cut_tiles, 1, *operands, BLOCK=1024, num_warps=8
            )
        return self._tiles[tile_rows]

    def new_tiles(self, tile_rows: int) -> Tiles:
        """Memory of `tiles`, filled by the caller."""
        made = Tiles(torch.empty_like(self.described), torch.empty_like(self.count))
        return self._tiles.setdefault(tile_rows, made)


def rows_for(operands: LoraOperands, kernel: str, tile_rows: int = 0, zeros: Zeros | None = None) -> Segments:
    """`build_segments` for "sgmv", `unsorted_rows` for the baselines."""
    rows = (operands.token_slots, operands.ids, operands.slots.num_slots, operands.site.num_experts)
    return build_segments(*rows, tile_rows, zeros) if kernel == "sgmv" else unsorted_rows(*rows)


def rows_to_sort(
    token_slots: torch.Tensor,
    ids: torch.Tensor | None,
    num_slots: int,
    num_experts: int,
    tile_rows: int = 0,
    zeros: Zeros | None = None,
) -> RowsToSort:
    """The unfilled result of `build_segments`."""
    numbers = token_slots if ids is None else ids
    rows = torch.empty(numbers.numel(), dtype=torch.int32, device=numbers.device)
    segments = Segments(rows=rows, described=rows.new_empty(len(rows), 4), count=rows.new_empty(1))
    cut, sorted_blocks = (segments.described, segments.count), segments.count
    cuts = tile_rows > 0 and zeros is not None
    if cuts and zeros is not None:
        cut = segments.new_tiles(tile_rows)
        sorted_blocks = zeros.take(1, token_slots.device)
    memory = (rows, segments.described, segments.count, *cut, sorted_blocks)
    sizes = (num_slots, max(1, num_experts), tile_rows)
    return RowsToSort(segments, (token_slots, *memory, sizes), cuts)


def build_segments(
    token_slots: torch.Tensor,
    ids: torch.Tensor | None,
    num_slots: int,
    num_experts: int,
    tile_rows: int = 0,
    zeros: Zeros | None = None,
) -> Segments:
    """Sort rows by (expert, slot), stably; rows without adapter or expert go last.

    token_slots: [T] int32, -1 = no adapter.  ids: [T, K] int32, -1 = no expert here, or None at dense sites.
    Numbers from num_slots and num_experts (0 counts as 1) on count as none.  tile_rows, zeros: also cut
    tiles.  Raises ValueError for other shapes, dtypes or devices.
    """
    check_rows_and_ids(token_slots, ids)
    num_rows = token_slots.numel() if ids is None else ids.numel()
    experts = max(1, num_experts)
    if num_rows > SORT_MAX_ROWS:
        return _sorted_by_torch(token_slots, ids, num_slots, experts)
    if num_rows == 0:
        made = rows_to_sort(token_slots, ids, num_slots, num_experts).segments
        made.count.zero_()
        return made
    to_sort = rows_to_sort(token_slots, ids, num_slots, num_experts, tile_rows, zeros)
    block, (_, *memory, sizes) = 64, to_sort.operands
    configs.start(
        configs.kernels("lora.segment_kernels").sort_rows,
        -(-num_rows // block),
        *(token_slots, token_slots if ids is None else ids, *memory, num_rows, *sizes),
        TOP_K=1 if ids is None else ids.shape[1],
        HAS_IDS=ids is not None,
        CUT=to_sort.cuts,
        BLOCK=block,
        BLOCK_OTHER=128,
        BLOCK_CUT=1024,
        num_warps=8,
    )
    return to_sort.segments


def unsorted_rows(
    token_slots: torch.Tensor, ids: torch.Tensor | None, num_slots: int, num_experts: int
) -> Segments:
    """Every row in place, for per-row baselines; `count` is R.  Raises as `build_segments`."""
    check_rows_and_ids(token_slots, ids)
    slot, expert = _slots_and_experts(token_slots, ids)
    fits = _fits(slot, expert, num_slots, max(1, num_experts))
    position = torch.arange(slot.numel(), dtype=torch.int32, device=slot.device)
    slot, expert = torch.where(fits, slot, -1), torch.where(fits, expert, -1)
    described = torch.stack([position, position + 1, slot, expert], 1)
    count = torch.full((1,), slot.numel(), dtype=torch.int32, device=slot.device)
    return Segments(rows=position, described=described, count=count, is_sorted=False)


def check_rows_and_ids(token_slots: torch.Tensor, ids: torch.Tensor | None) -> None:
    """Raise ValueError unless token_slots is [T] and ids [T, K], both int32, contiguous, on one device."""
    for name, tensor, dims in (("token_slots", token_slots, 1), ("ids", ids, 2)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int32 or tensor.dim() != dims or not tensor.is_contiguous():
            shape, dtype = tuple(tensor.shape), tensor.dtype
            raise ValueError(f"{name} is {shape} {dtype}; it must be int32, contiguous, {dims}-dimensional")
    if ids is not None and (ids.shape[0] != token_slots.shape[0] or ids.device != token_slots.device):
        raise ValueError(
            f"ids {tuple(ids.shape)} on {ids.device} do not fit token_slots {tuple(token_slots.shape)} on "
            f"{token_slots.device}; both have one row per token and lie on one device"
        )


def _slots_and_experts(
    token_slots: torch.Tensor, ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if ids is None:
        return token_slots, torch.zeros_like(token_slots)
    return token_slots[:, None].expand(ids.shape).reshape(-1), ids.reshape(-1)


def _fits(slot: torch.Tensor, expert: torch.Tensor, num_slots: int, num_experts: int) -> torch.Tensor:
    return (slot >= 0) & (slot < num_slots) & (expert >= 0) & (expert < num_experts)


def _sorted_by_torch(
    token_slots: torch.Tensor, ids: torch.Tensor | None, num_slots: int, num_experts: int
) -> Segments:
    slot, expert = _slots_and_experts(token_slots, ids)
    fits = _fits(slot, expert, num_slots, num_experts)
    key, rows = torch.where(fits, expert * num_slots + slot, num_experts * num_slots).sort(stable=True)
    none = key >= num_experts * num_slots
    described = torch.stack(
        [
            torch.searchsorted(key, key, out_int32=True),
            torch.searchsorted(key, key, right=True, out_int32=True),
            torch.where(none, -1, key % num_slots),
            torch.where(none, -1, key // num_slots),
        ],
        1,
    )
    count = (~none).sum(dtype=torch.int32).reshape(1)
    return Segments(rows=rows.int(), described=described, count=count)
