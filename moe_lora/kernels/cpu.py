"""CPU kernels (the torch reference until the library is bound)."""

from __future__ import annotations

import torch

from .reference import expert_linear, linear, lora_delta, paged_attention

LINEAR_MAX_ROWS = {torch.float32: 0, torch.bfloat16: 0}
lora_shrink = lora_delta


def lora_expand(started, ids, site, layer, row_slot, slots, arena, y) -> None:  # type: ignore[no-untyped-def]
    y.add_(started.to(y.dtype))


__all__ = [
    "LINEAR_MAX_ROWS",
    "expert_linear",
    "linear",
    "lora_delta",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
]
