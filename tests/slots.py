# SPDX-License-Identifier: Apache-2.0
"""Adapters put into an arena at once, for tests of what reads them there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.kernels.operands import SlotTable
from moe_lora.lora.local import part_bytes, point_slot


def write_slot(
    slots: SlotTable,
    slot: int,
    arena: torch.Tensor,
    packed: PackedAdapter,
    offsets_bytes: Sequence[int],
) -> None:
    """Copy the adapter's layers to these bytes of the arena and make `slot` mean it."""
    for layer, offset in zip(packed.layers, offsets_bytes, strict=True):
        arena[offset : offset + layer.nbytes].copy_(part_bytes(layer, layer))
    point_slot(slots, slot, packed, offsets_bytes)
