# SPDX-License-Identifier: Apache-2.0
"""Steps of a model with heads of two sizes: a page holds the layers with a window, then the full layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_lora.core.shape import ModelShape
from moe_lora.engine.ranks.exchange import ALONE, Exchanges
from moe_lora.kernels.cpu.cpu import StepAttention
from moe_lora.kernels.operands import KvLayout, StepTables, with_full_layers
from moe_lora.lora.backend import LoraBackend
from moe_lora.lora.row_routing import RowRouting

from .execution_context import ExecutionContext


class SizedContext(ExecutionContext):
    """`ExecutionContext` with KV of two layouts in each page."""

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KvLayout,
        backend: LoraBackend,
        shape: ModelShape,
        exchanges: Exchanges = ALONE,
    ) -> None:
        super().__init__(arena, layout, backend, exchanges, shape.num_layers)
        assert shape.global_heads is not None
        full = set(shape.global_heads.layers)
        whole = replace(layout, num_layers=shape.num_layers, least_bytes=0)
        self._full_layout = with_full_layers(whole, shape.global_heads)[1]
        self._full_attention: StepAttention | None = None
        windowed = (layer for layer in range(shape.num_layers) if layer not in full)
        self._numbers = {layer: number for number, layer in enumerate(windowed)}
        last = self._full_layout.num_layers - len(full)
        self._full_numbers = {layer: last + i for i, layer in enumerate(sorted(full))}

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the batch of the operations."""
        super().begin_step(step, routing)
        self._full_attention = StepAttention(step, self._full_layout, self._arena)

    def paged_attention(self, layer: int, *operands: Any) -> torch.Tensor:
        """As `ExecutionContext.paged_attention`, by the layer's heads."""
        if layer in self._numbers:
            return super().paged_attention(self._numbers[layer], *operands)
        assert self._full_attention is not None, "begin_step comes first"
        return self._full_attention(self._full_numbers[layer], *operands)
