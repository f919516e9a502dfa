# SPDX-License-Identifier: Apache-2.0
"""Output columns scaled and shifted by an adapter: DoRA's magnitudes, and biases of lora_B.

For such a row, after base layer and deltas, by column:

    y = factor * y + shift

DoRA: factor = m / |W + s B A| by row of W, shift = (1 - factor) * bias of the base; constant once loaded.  A
bias b of lora_B: shift = s * b.  The arena has (factor - 1, shift) as the B matrix of a column site
(`ModelShape.column_sites`).
Source: DoRA (arXiv 2402.09353), equation 5 and section 4.3; peft, tuners/lora/dora.py.

Legend: T token rows, O outputs of a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_lora.core.shard import ModelShard
from moe_lora.kernels.cpu.site_linear import LoraRows
from moe_lora.kernels.operands import SlotTable, StepTables

from .backend import AddTo, LoraBackend, OuterBackend
from .row_routing import RowRouting, Source

if TYPE_CHECKING:
    from moe_lora.kernels.triton.lora.segments import RowsToSort

Rows = slice | torch.Tensor
"""One slot's rows: a range, or [T] int64."""
Columns = tuple[Rows, slice, torch.Tensor]
"""Rows, their columns, and (factor - 1, shift) [2, O]."""


class ColumnBackend(OuterBackend):
    """LoraBackend around the deltas' backend; CPU only.

    The first rank shifts the columns of a sum over ranks.
    """

    def __init__(self, inner: LoraBackend, shard: ModelShard, arena: torch.Tensor, slots: SlotTable) -> None:
        super().__init__(inner)
        self._arena = arena
        self._slots = slots
        self._rows: list[tuple[Rows, list[list[int]]]] = []
        self._first_entry = shard.shape.column_sites[0].entry_base
        numbers = {site.name: number for number, site in enumerate(shard.whole.sites)}
        self._sites = {numbers[site.name]: site for site in shard.shape.column_sites}
        self._shifts = {
            number: shard.dist_rank == 0 or not shard.is_summed(shard.whole.sites[number])
            for number in self._sites
        }

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        super().begin_step(step, routing)
        assert routing.columns is not None, "no row has columns"
        slots = routing.terms_from(Source.LOCAL, routing.columns)["slot"]
        self._rows = [
            (_range_of(np.flatnonzero(slots == slot)), self._offsets(slot))
            for slot in np.unique(slots[slots >= 0]).tolist()
        ]

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        add_to = self.inner.begin(layer, site, x, ids)
        columns = list(self._columns(layer, site, x.dtype)) if site in self._sites else []
        return partial(_add_to, add_to, self._shifts[site], columns) if columns else add_to

    def rows_here(self, layer: int, site: int) -> LoraRows | None:
        return None if site in self._sites else self.inner.rows_here(layer, site)

    def rows_to_sort(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor) -> RowsToSort | None:
        return self.inner.rows_to_sort(layer, site, x, ids)

    def _offsets(self, slot: int) -> list[list[int]]:
        """First byte of (factor - 1, shift), by layer and entry; -1 without."""
        entries = slot, slice(None), slice(self._first_entry, None)
        found = torch.where(self._slots.lora_rank[entries] > 0, self._slots.b_offset[entries], -1)
        offsets: list[list[int]] = found.tolist()
        return offsets

    def _columns(self, layer: int, site_number: int, dtype: torch.dtype) -> Iterator[Columns]:
        site = self._sites[site_number]
        for rows, offsets in self._rows:
            for module, (first, width) in enumerate(zip(site.columns, site.out_features, strict=True)):
                start = offsets[layer][site.entry(module) - self._first_entry]
                if start >= 0:
                    values = self._arena[start : start + 2 * width * dtype.itemsize].view(dtype)
                    yield rows, slice(first, first + width), values.view(2, width)


def _add_to(add_to: AddTo | None, shifts: bool, columns: list[Columns], y: torch.Tensor) -> None:
    if add_to is not None:
        add_to(y)
    for rows, where, values_2O in columns:
        part_TO = y[rows, where].float()
        gain_O, shift_O = values_2O.float()
        part_TO = torch.addcmul(part_TO, part_TO, gain_O)
        y[rows, where] = (part_TO.add_(shift_O) if shifts else part_TO).to(y.dtype)


def _range_of(rows: np.ndarray) -> Rows:
    """Ascending rows; a slice if without gaps."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else torch.from_numpy(rows)
