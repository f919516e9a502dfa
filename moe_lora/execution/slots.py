"""Putting an adapter into the arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.kernels.step import SlotTable


def write_slot(
    slots: SlotTable,
    slot: int,
    arena: torch.Tensor,
    packed: PackedAdapter,
    layer_offsets_bytes: Sequence[int],
) -> None:
    """Copy each layer's data to its byte offset in the arena and point the slot's table rows there.

    layer_offsets_bytes: one per layer, multiples of 64.
    """
    slots.max_lora_ranks[slot] = packed.max_lora_rank
    for layer, (part, offset) in enumerate(zip(packed.layers, layer_offsets_bytes, strict=True)):
        source = part.data.view(torch.uint8)
        arena[offset : offset + source.numel()].copy_(source)
        table = part.table.to(arena.device)
        itemsize = part.data.element_size()
        slots.a_offset[slot, layer] = offset + table[:, 0] * itemsize
        slots.b_offset[slot, layer] = offset + table[:, 1] * itemsize
        slots.lora_rank[slot, layer] = table[:, 2].int()
        slots.scale[slot, layer] = part.scale.to(arena.device)
