# SPDX-License-Identifier: Apache-2.0
"""Steps of a model with unequal layers: recurrent states, or KV heads of two sizes.

A sequence's states lie in the first pages of its block table.  The gated delta rule goes token by token: bits
do not depend on the cut of a prompt into steps.  With heads of two sizes a page holds the layers with a
window, then the full layers.

Legend: T tokens of the sequence in a step, C channels of the convolution, W its width, J key heads, N value
heads, K size of a key head, V of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from moe_lora.cache.pages import BlockTable
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.shape import ModelShape
from moe_lora.engine.ranks.exchange import ALONE, Exchanges
from moe_lora.engine.sequence import Sequence
from moe_lora.kernels.cpu.cpu import StepAttention
from moe_lora.kernels.operands import KvLayout, StepTables, with_full_layers
from moe_lora.lora.backend import LoraBackend
from moe_lora.lora.row_routing import RowRouting
from moe_lora.scheduling.views import Scheduled

from .execution_context import ExecutionContext
from .runner import ModelRunner
from .step_batch import StepBatch

NORM_EPS = 1e-6
"""Of the norms of q and k."""


def delta_rule(
    qkv_TC: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    conv_CW: torch.Tensor,
    num_k_heads: int,
    v_dim: int,
    state: torch.Tensor,
) -> torch.Tensor:
    """S = exp(log_decay) * S, then S = S + k (beta * (v - k S)), and out = q S / sqrt(K), per value head.

    q, k, v: silu of the causal convolution of qkv; q and k have length 1.  state: of the tokens before, fp32
    `DeltaShape.state_floats`: the last W - 1 rows of qkv, then S [N, K, V]; updated in place; zeros at first.
    Returns [T, N, V] fp32.  Source: Gated DeltaNet (arXiv 2412.06464), equation 10.
    """
    num_tokens, num_heads = beta_TN.shape
    conv_WC = conv_CW.float().t().contiguous()
    history_WC = state[: (len(conv_WC) - 1) * qkv_TC.shape[1]].view(len(conv_WC) - 1, -1)
    memory_NKV = state[history_WC.numel() :].view(num_heads, -1, v_dim)
    rows_TC = torch.cat([history_WC, qkv_TC.float()])
    out_TNV = memory_NKV.new_empty(num_tokens, num_heads, v_dim)
    for t in range(num_tokens):  # with the same shapes for each token: a shape decides the order of sums
        mixed_C = F.silu((rows_TC[t : t + len(conv_WC)] * conv_WC).sum(0))
        q_k_C, v_NV = mixed_C[: -num_heads * v_dim], mixed_C[-num_heads * v_dim :].view(num_heads, v_dim)
        q_NK, k_NK = _unit_heads(q_k_C, num_k_heads).repeat_interleave(num_heads // num_k_heads, dim=1)
        memory_NKV *= log_decay_TN[t].exp()[:, None, None]
        change_NV = (v_NV - (memory_NKV * k_NK.unsqueeze(2)).sum(1)) * beta_TN[t].unsqueeze(1)
        memory_NKV += k_NK.unsqueeze(2) * change_NV.unsqueeze(1)
        out_TNV[t] = (memory_NKV * q_NK.unsqueeze(2)).sum(1) * q_NK.shape[1] ** -0.5
    history_WC.copy_(rows_TC[num_tokens:])
    return out_TNV


def _unit_heads(q_k_C: torch.Tensor, num_k_heads: int) -> torch.Tensor:
    """q and k with heads of length 1: [2, J, K]."""
    heads = q_k_C.view(2, num_k_heads, -1)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)


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
        """`delta_rule` of each sequence."""
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
