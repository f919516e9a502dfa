# SPDX-License-Identifier: Apache-2.0
"""Steps of a model with recurrent layers: a sequence's state lies in the first pages of its block table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from moe_lora.cache.pages import BlockTable
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.shape import ModelShape
from moe_lora.engine.ranks.exchange import ALONE, Exchanges
from moe_lora.engine.sequence import Sequence
from moe_lora.kernels.delta_rule import delta_rule
from moe_lora.kernels.operands import KvLayout, StepTables
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
        self._state_floats = shape.delta.state_floats
        self._pages = arena[: arena.numel() // page_bytes * page_bytes].view(-1, page_bytes)
        self._rows: list[tuple[slice, bool]] = []
        self._tables = torch.empty(0)
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the batch of the operations.  A sequence's first step starts from zeros."""
        self._changed.clear()
        starts, lengths = step.query_start.tolist(), step.seq_lens.tolist()
        self._rows = [
            (slice(start, end), length == end - start)
            for start, end, length in zip(starts, starts[1:], lengths, strict=False)
            if length
        ]
        live, num = step.seq_lens > 0, self._num_pages
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
        num_k_heads: int,
        v_dim: int,
    ) -> torch.Tensor:
        """`kernels.delta_rule` of each sequence."""
        first = self._state_number[layer] * self._layer_pages
        out = qkv.new_zeros(*beta.shape, v_dim)
        for (rows, is_first), pages in zip(self._rows, self._tables, strict=True):
            where = pages[first : first + self._layer_pages]
            held = self._pages.new_zeros(len(where), self._pages.shape[1]) if is_first else self._pages[where]
            state = held.view(torch.float32).flatten()[: self._state_floats]
            given = (qkv[rows], log_decay[rows], beta[rows], conv, num_k_heads, v_dim)
            out[rows] = delta_rule(*given, state).to(out.dtype)
            self._changed.append((where, held))
        return out

    def store_states(self) -> None:
        """Write the states of the step to their pages."""
        for where, held in self._changed:
            self._pages[where] = held
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
