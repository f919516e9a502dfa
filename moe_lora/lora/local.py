# SPDX-License-Identifier: Apache-2.0
"""The coupled backend: deltas from this device's arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_lora.adapters.packed import LayerShard, PackedAdapter, PackedLayer
from moe_lora.core.shape import MATRIX_ALIGN_BYTES, ModelShape, Site
from moe_lora.kernels.cpu.site_linear import NO_ROWS, LoraRows, lora_rows
from moe_lora.kernels.lora import SharedSegments, Shrunk, deltas_of, lora_expand, lora_shrink
from moe_lora.kernels.operands import LoraOperands, SlotTable

from .backend import AddTo, LoraBackend
from .row_routing import Source

if TYPE_CHECKING:
    from moe_lora.kernels.triton.lora.problem import Deltas
    from moe_lora.kernels.triton.lora.segments import RowsToSort


def _is_taken_before(site: Site) -> bool:
    """True if the base layer takes the deltas before its launch."""
    return site.num_experts > 0 and len(site.modules) > 1


class SideStream:
    """A second CUDA stream for captured steps, beside the main stream's next launches.

    Join each fork before the next fork and before the capture ends.  A fork's memory is reused only after the
    next fork, so later than all its readers.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @property
    def is_open(self) -> bool:
        """True under capture."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches in the context go to the side, after earlier main launches."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Later main launches wait for the side."""
        torch.cuda.current_stream().wait_stream(self._stream)


class LocalDeltas:
    """AddTo of this device's deltas; on CUDA an expert layer may take them before its launch."""

    def __init__(self, shrunk: Shrunk, subtract: bool, side: SideStream | None = None) -> None:
        self._shrunk = shrunk
        self._subtract = subtract
        self._side = side

    def __call__(self, y: torch.Tensor) -> None:
        if self._side is not None:
            self._side.join()
        lora_expand(self._shrunk, y, subtract=self._subtract)

    def alone(self) -> Deltas | None:
        """Deltas for a fused base layer; None if impossible."""
        if self._side is not None:
            self._side.join()
        return None if self._subtract else deltas_of(self._shrunk)


class LocalBackend(LoraBackend):
    """LoraBackend over adapters in this device's arena.

    kernel: "sgmv" or a baseline.  A negated source subtracts.  beside: captured decode steps run shrinks
    beside the base layers.
    """

    def __init__(
        self,
        shape: ModelShape,
        arena: torch.Tensor,
        slots: SlotTable,
        *,
        kernel: str = "sgmv",
        source: int = Source.LOCAL,
        beside: bool = False,
    ) -> None:
        self._side = SideStream(arena.device) if beside else None
        self._sites = shape.sites
        self._arena = arena
        self._slots = slots
        self._kernel = kernel
        self._source = source

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        operands, batch_rank = self._operands(layer, site, x, ids)
        if not batch_rank:
            return None
        side, decode = self._side, self._step.decode
        if side is not None and not (decode and side.is_open and not _is_taken_before(operands.site)):
            side = None
        with nullcontext() if side is None else side.fork():
            shrunk = lora_shrink(
                operands,
                kernel=self._kernel,
                decode=decode,
                shared=self._once(SharedSegments),
                batch_rank=batch_rank,
            )
        return LocalDeltas(shrunk, self._source < 0, side)

    def rows_to_sort(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor) -> RowsToSort | None:
        operands, batch_rank = self._operands(layer, site, x, ids)
        if not batch_rank or self._kernel != "sgmv":
            return None
        return self._once(SharedSegments).to_sort(operands, self._step.decode)

    def rows_here(self, layer: int, site: int) -> LoraRows | None:
        return self._once(self._made_rows, self._routing.groups[layer][site], site)

    def _made_rows(self, group: int, site: int) -> LoraRows | None:
        if not self._arena.is_cpu or self._source < 0:
            return None
        token_slots, site_ranks = self._once(self._copied_slots, group)
        if not site_ranks[site]:
            return NO_ROWS
        return lora_rows(self._sites[site], token_slots, self._slots, self._arena, self._kernel)

    def _operands(
        self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None
    ) -> tuple[LoraOperands, int]:
        """The operands, and the rows' largest LoRA rank, 0 without deltas."""
        token_slots, site_ranks = self._once(self._copied_slots, self._routing.groups[layer][site])
        place = self._sites[site], layer, token_slots, self._slots, self._arena
        return LoraOperands(x, ids, *place), site_ranks[site]

    def _copied_slots(self, group: int) -> tuple[torch.Tensor, list[int]]:
        routing = self._routing
        slot = np.ascontiguousarray(routing.terms_from(self._source, group)["slot"])
        site_ranks = routing.site_ranks
        if site_ranks is None:
            site_ranks = self._slots.site_ranks(slot, self._sites)
        on_device = routing.on_device.get((self._source, group))
        if on_device is None:
            host = torch.from_numpy(slot)
            # Only page-locked memory is copied without a wait.
            host = host.pin_memory() if self._arena.is_cuda else host
            on_device = host.to(self._arena.device, non_blocking=True)
        return on_device, list(site_ranks)


LayerPart = PackedLayer | LayerShard
"""A layer's part in an arena: whole, or some entries packed without gaps."""


def part_bytes(layer: PackedLayer, part: LayerPart) -> torch.Tensor:
    """The bytes of a layer's part, 1-D uint8; a copy if cut."""
    data = layer.data
    if isinstance(part, LayerShard):
        data = layer.data.new_empty(part.num_elements)
        part.copy(layer.data, data)
    return data.view(torch.uint8)


def point_slot(
    slots: SlotTable,
    slot: int,
    packed: PackedAdapter,
    layer_offsets_bytes: Sequence[int],
    parts: Sequence[LayerPart] | None = None,
) -> None:
    """Point `slot` at an adapter with layers at these offsets, multiples of 64.

    parts: of each layer, None = whole.  Reads of other slots may go on.
    """
    parts = parts or packed.layers
    open_slot(slots, slot, packed)
    for number, offset in enumerate(layer_offsets_bytes):
        point_layer(slots, slot, number, packed.layers[number], parts[number], offset)


def open_slot(slots: SlotTable, slot: int, packed: PackedAdapter) -> None:
    """Assign `slot` to this adapter, without layers yet.

    Ranks are the whole adapter's: all ranks decide alike.
    """
    slots.clear(slot)
    ranks = torch.stack([layer.table[:, 2] for layer in packed.layers])
    slots.ranks[slot, : ranks.shape[1]] = ranks.amax(0).numpy()


def point_layer(
    slots: SlotTable, slot: int, number: int, layer: PackedLayer, part: LayerPart, offset_bytes: int
) -> None:
    """Point `slot` at a layer's part.  offset_bytes: a multiple of 64."""
    assert offset_bytes % MATRIX_ALIGN_BYTES == 0
    itemsize = layer.data.element_size()
    num_bytes = part.num_elements * itemsize if isinstance(part, LayerShard) else layer.nbytes
    where = range(offset_bytes, offset_bytes + num_bytes)
    slots.write_layer(slot, number, part.table, part.scale, itemsize, where)
    slots.present[slot, number] = True
