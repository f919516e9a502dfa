"""Placing a packed adapter into the arena and its offsets into the slot table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_lora.adapters.packed import PackedAdapter, PackedLayer
from moe_lora.adapters.shard import LayerShard
from moe_lora.core.shape import MATRIX_ALIGN_BYTES
from moe_lora.kernels.operands import SlotTable

LayerPart = PackedLayer | LayerShard
"""What of a layer lies in an arena: all of it, or some entries packed again without gaps."""


def part_bytes(layer: PackedLayer, part: LayerPart) -> torch.Tensor:
    """1-D uint8: the bytes of `part`, which is `layer` itself or cut from it; a copy if it was cut."""
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
    """Make `slot` mean the adapter whose layers' bytes lie from these offsets on.

    layer_offsets_bytes: multiples of 64.  parts: what of each layer lies there, None = all of it.  Other
    slots may be read meanwhile.
    """
    slots.clear(slot)
    parts = parts or packed.layers
    for number, (layer, part, offset) in enumerate(
        zip(packed.layers, parts, layer_offsets_bytes, strict=True)
    ):
        assert offset % MATRIX_ALIGN_BYTES == 0
        slots.write_layer(slot, number, part.table, part.scale, layer.data.element_size(), offset)
    ranks = torch.stack([part.table[:, 2] for part in parts])
    slots.max_lora_ranks[slot] = tuple(ranks.amax(0).tolist())
