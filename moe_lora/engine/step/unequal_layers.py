# SPDX-License-Identifier: Apache-2.0
"""Steps of a model with unequal layers: recurrent states, or KV heads of two sizes.

A sequence's states lie in the first pages of its block table.  With heads of two sizes a page holds the
layers with a window, then the full layers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from moe_lora.cache.pages import BlockTable
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.shape import ModelShape
from moe_lora.engine.ranks.exchange import ALONE, Exchanges
from moe_lora.engine.sequence import Sequence
from moe_lora.kernels.cpu.cpu import StepAttention, delta_rule
from moe_lora.kernels.operands import KvLayout, StepTables, with_full_layers
from moe_lora.lora.backend import LoraBackend
from moe_lora.lora.row_routing import RowRouting
from moe_lora.scheduling.views import Scheduled

from .execution_context import ExecutionContext
from .runner import ModelRunner
from .step_batch import StepBatch


class StateCache(UnifiedCache):
    """`UnifiedCache` with the pages of a sequence's state first in its table.

    Prefixes are not shared: KV of a prefix serves with the state after the prefix only.
    """

    def __init__(self, *, state_pages: int, block_size: int, **settings: Any) -> None:
        super().__init__(block_size=block_size, prefix_caching=False, **settings)
        self._state_tokens = state_pages * block_size

    def grow(self, table: BlockTable, num_tokens: int, now_s: float) -> bool:
        """As `UnifiedCache.grow`, for the state too."""
        return super().grow(table, num_tokens + self._state_tokens, now_s)


class RecurrentContext(ExecutionContext):
    """`ExecutionContext` with states of sequences and KV of the layers of attention.

    A state changes once per step: new states are stored by `store_states` after the last layer, so a step
    that raised may run again.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KvLayout,
        backend: LoraBackend,
        shape: ModelShape,
        exchanges: Exchanges = ALONE,
    ) -> None:
        super().__init__(arena, layout, backend, exchanges, shape.num_layers)
        assert shape.delta is not None
        page_bytes = layout.page_bytes
        layers = range(shape.num_layers)
        self._kv_number = {n: i for i, n in enumerate(n for n in layers if not shape.is_recurrent(n))}
        self._state_number = {layer: i for i, layer in enumerate(shape.delta.layers)}
        self._num_pages = shape.state_pages(page_bytes)
        self._layer_pages = self._num_pages // len(shape.delta.layers)
        self._delta = shape.delta
        self._pages = arena[: arena.numel() // page_bytes * page_bytes].view(-1, page_bytes)
        self._numbers = self._pages.view(torch.float32)
        self._spans = self._tables = torch.empty(0)
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the batch of the operations.  A sequence's first step starts from zeros."""
        self._changed.clear()
        starts, ends, live = step.query_start[:-1], step.query_start[1:], step.seq_lens > 0
        num, spans = self._num_pages, (starts, ends, step.seq_lens == ends - starts)
        self._spans = torch.stack([part[live].long() for part in spans], dim=1)
        self._tables = step.block_tables[live, :num].long()
        kv_tables = (
            step.block_tables[:, num:] if step.block_tables.shape[1] > num else step.block_tables[:, :1]
        )
        tables = StepTables(
            query_start=step.query_start,
            seq_lens=step.seq_lens,
            block_tables=kv_tables.contiguous(),
            decode=step.decode,
        )
        super().begin_step(tables, routing)

    def abandon_step(self) -> None:
        """Drop a step that raised, with its states."""
        self._changed.clear()
        super().abandon_step()

    def paged_attention(self, layer: int, *operands: Any) -> torch.Tensor:
        """As `ExecutionContext.paged_attention`."""
        return super().paged_attention(self._kv_number[layer], *operands)

    def delta_rule(
        self,
        layer: int,
        qkv: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        conv: torch.Tensor,
        v_dim: int,
    ) -> torch.Tensor:
        """`kernels.cpu.cpu.delta_rule` of each sequence."""
        first = self._state_number[layer] * self._layer_pages
        pages = self._tables[:, first : first + self._layer_pages]
        out, states = delta_rule(qkv, log_decay, beta, conv, self._delta, self._spans, pages, self._pages)
        self._changed.append((pages, states))
        return out

    def store_states(self) -> None:
        """Write the states of the step to their pages."""
        for pages, states in self._changed:
            self._numbers[pages.flatten()] = states.flatten(0, 1)
        self._changed.clear()


class RecurrentRunner(ModelRunner):
    """`ModelRunner` over a `RecurrentContext`."""

    _has_stored = False

    def can_repeat(self, error: Exception) -> bool:
        """As `ModelRunner.can_repeat`, until the states of the step are stored on a rank."""
        return super().can_repeat(error) and not self._has_stored and not self._is_with_others

    def run(self, plan: Seq[Scheduled[Sequence]], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """As `ModelRunner.run`."""
        self._has_stored = False
        return super().run(plan, drawn)

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        logits = super()._compute(batch)
        assert isinstance(self._context, RecurrentContext)
        self._context.store_states()
        self._has_stored = True
        return logits


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
