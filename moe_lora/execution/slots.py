"""Placing a packed adapter into the arena and its offsets into the slot table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.shape import MATRIX_ALIGN_BYTES
from moe_lora.kernels.step import SlotTable


def write_slot(
    slots: SlotTable,
    slot: int,
    arena: torch.Tensor,
    packed: PackedAdapter,
    layer_offsets_bytes: Sequence[int],
) -> None:
    """Copy each layer's matrices into the arena and make `slot` mean this adapter.

    arena: 1-D uint8, on the table's device.  layer_offsets_bytes: per layer where its `nbytes` bytes begin,
    multiples of 64; bytes in use by any other slot must not be among them.
    """
    slots.clear(slot)
    for number, (layer, offset) in enumerate(zip(packed.layers, layer_offsets_bytes, strict=True)):
        assert offset % MATRIX_ALIGN_BYTES == 0
        assert offset + layer.nbytes <= arena.numel()
        arena[offset : offset + layer.nbytes].copy_(layer.data.view(torch.uint8))
        slots.write_layer(slot, number, layer.table, layer.scale, layer.data.element_size(), offset)
    ranks = torch.stack([layer.table[:, 2] for layer in packed.layers])
    slots.max_lora_ranks[slot] = tuple(ranks.amax(0).tolist())
