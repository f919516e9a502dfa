"""Placing a packed adapter into the arena and its offsets into the slot table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_lora.adapters.packed import PackedAdapter, PackedLayer
from moe_lora.adapters.shard import LayerShard
from moe_lora.core.shape import MATRIX_ALIGN_BYTES
from moe_lora.kernels.step import SlotTable


def write_slot(
    slots: SlotTable,
    slot: int,
    arena: torch.Tensor,
    packed: PackedAdapter,
    layer_offsets_bytes: Sequence[int],
    shards: Sequence[LayerShard] | None = None,
) -> None:
    """Copy each layer's matrices into the arena and make `slot` mean this adapter.

    arena: 1-D uint8, on the table's device.  layer_offsets_bytes: per layer where its `nbytes` bytes begin,
    multiples of 64; bytes in use by any other slot must not be among them.  shards: per layer the part to
    take, None = all of it.
    """
    slots.clear(slot)
    parts: Sequence[PackedLayer | LayerShard] = shards or packed.layers
    for number, (layer, part, offset) in enumerate(
        zip(packed.layers, parts, layer_offsets_bytes, strict=True)
    ):
        assert offset % MATRIX_ALIGN_BYTES == 0
        itemsize = layer.data.element_size()
        num_elements = part.num_elements if isinstance(part, LayerShard) else layer.data.numel()
        assert offset + num_elements * itemsize <= arena.numel()
        place = arena[offset : offset + num_elements * itemsize].view(layer.data.dtype)
        if isinstance(part, LayerShard):
            part.copy(layer.data, place)
        else:
            place.copy_(layer.data)
        slots.write_layer(slot, number, part.table, part.scale, itemsize, offset)
    ranks = torch.stack([part.table[:, 2] for part in parts])
    slots.max_lora_ranks[slot] = tuple(ranks.amax(0).tolist())
