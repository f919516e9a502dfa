"""The LoRA kernels of the device that the operands lie on: CPU library, or the torch reference.

Legend: T token rows, H input width, N output width, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import cpu, reference
from .step import SlotTable

if TYPE_CHECKING:
    from moe_lora.core.shape import Site


def lora_delta(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    site: Site,
    layer: int,
    row_slot: torch.Tensor,
    slots: SlotTable,
    arena: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out = delta of each row, zero where it has no adapter; see `reference.lora_delta`.

    out: [T, N] or [T*K, N] in x's dtype, overwritten.
    """
    if x.is_cpu:
        cpu.lora_delta(x, ids, site, layer, row_slot, slots, arena, out)
    else:
        out.copy_(reference.lora_delta(x, ids, site, layer, row_slot, slots, arena))
