# SPDX-License-Identifier: Apache-2.0
"""State behind an engine's channels: arena, step, LoRA backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.engine.ranks.exchange import ALONE, Exchanges
from moe_lora.kernels import ops, reference
from moe_lora.kernels.cpu import cpu, site_linear
from moe_lora.kernels.cpu.site_linear import SiteLinear, StepCalls
from moe_lora.kernels.operands import AttentionOperands, KvLayout, Rotation, StepTables, Zeros
from moe_lora.kernels.quantised import QuantisedOperand
from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.lora.local import LocalDeltas
from moe_lora.lora.row_routing import RowRouting
from moe_lora.models.linear import numbered_from

if TYPE_CHECKING:
    from moe_lora.kernels.triton.lora.problem import Deltas
    from moe_lora.kernels.triton.lora.segments import RowsToSort


class ExecutionContext:
    """Implements the channel operations of one model instance.

    Layer l passes `channels[l]`.  num_layers: of a model whose layers of KV have other numbers; None: as
    `layout`.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KvLayout,
        backend: LoraBackend,
        exchanges: Exchanges = ALONE,
        num_layers: int | None = None,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self.backend = backend
        self.with_columns: Callable[[], LoraBackend] | None = None
        """The backend of steps with scaled or shifted columns."""
        self._without_columns: LoraBackend | None = None
        """The usual backend, after such a step."""
        self.exchanges = exchanges
        self._step: StepTables | None = None
        self.zeros = Zeros()
        self._begun: dict[tuple[int, int], AddTo] = {}
        self._linears: dict[tuple[int, int], SiteLinear] = {}
        self._attention: cpu.StepAttention | None = None
        has_calls = num_layers is None and arena.is_cpu and site_linear.has_step_calls
        self._calls = StepCalls(layout.num_layers) if has_calls else None
        self.channels = ops.open_channels(self, num_layers or layout.num_layers, self._calls)

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the operations' batch."""
        assert not self._begun, "a site of the last step was begun, and its deltas were never added"
        self._step = step
        if self._arena.is_cpu:
            self._attention = cpu.StepAttention(step, self._layout, self._arena)
        else:
            self.zeros = Zeros()
        if self._without_columns is not None:
            self.backend, self._without_columns = self._without_columns, None
        if routing.columns is not None:
            assert self.with_columns is not None
            self.backend, self._without_columns = self.with_columns(), self.backend
        self.backend.begin_step(step, routing)
        if self._calls is not None and self._attention is not None:
            first, same = routing.groups[0], routing.groups.count(routing.groups[0]) == len(routing.groups)
            rows = [self.backend.rows_here(0, site) for site in range(len(first))] if same else []
            self._calls.begin_step(rows, self._attention)

    def abandon_step(self) -> None:
        """Drop a step that raised."""
        self._begun.clear()
        self.backend.abandon_step()

    def lora_begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> None:
        add_to = self.backend.begin(layer, site, x, ids)
        if add_to is not None:
            self._begun[layer, site] = add_to

    def lora_add_to(self, layer: int, site: int, y: torch.Tensor) -> None:
        if self.has_deltas(layer, site):
            self._begun.pop((layer, site))(y)

    def deltas_before(self, layer: int, site: int) -> Deltas | None:
        """A begun site's deltas, for a base layer that adds them; None: `lora_add_to` adds them."""
        begun = self._begun.get((layer, site))
        deltas = begun.alone() if isinstance(begun, LocalDeltas) else None
        if deltas is not None:
            del self._begun[layer, site]
        return deltas

    def lora_linear(
        self,
        layer: int,
        site: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weight: torch.Tensor | QuantisedOperand,
        bias: torch.Tensor | None,
        first_expert: int,
        num_out: int,
    ) -> torch.Tensor:
        """Base layer and deltas of a site: one call of the CPU library for local deltas.

        ids: numbered in the whole model.
        """
        rows, known = self.backend.rows_here(layer, site), self._linears.get((layer, site))
        data = weight.data if isinstance(weight, QuantisedOperand) else weight
        if known is not None and known.address_of_data != data.data_ptr():
            known = None
        if rows is not None and known is not None:
            y = known(x, ids, rows)
            if y is not None:
                return y
        add_to = self.backend.begin(layer, site, x, ids)
        held = None if ids is None else numbered_from(first_expert, ids)
        y = ops.multiply(x, weight, bias, held, num_out)
        if add_to is not None:
            add_to(y)
        if rows is not None and known is None:
            experts = None if ids is None else first_expert
            operands = (weight, bias, x.shape[1], num_out, experts)
            linear = self._linears[layer, site] = SiteLinear(layer, x.dtype, *operands)
            if self._calls is not None:
                self._calls.see(layer, site, linear)
        return y

    def rows_to_sort(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor) -> RowsToSort | None:
        return self.backend.rows_to_sort(layer, site, x, ids)

    def has_deltas(self, layer: int, site: int) -> bool:
        """True if `lora_add_to` has an effect."""
        return (layer, site) in self._begun

    def paged_attention(self, layer: int, *operands: Any) -> torch.Tensor:
        """operands: q to window of `AttentionOperands`."""
        if self._attention is not None:
            return self._attention(layer, *operands)
        assert self._step is not None, "begin_step comes first"
        attention = AttentionOperands._make((*operands, layer, self._step, self._layout, self._arena))
        if attention.q.device.type != "cuda":
            return reference.paged_attention(attention)
        from moe_lora.kernels.triton.attention import triton_attention

        return triton_attention.paged_attention(attention)

    def rotary_attention(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, num_kv_heads: int, *rest: Any
    ) -> torch.Tensor:
        """On CUDA.  rest: sinks to window of `AttentionOperands`."""
        from moe_lora.kernels.triton.attention import triton_attention

        assert self._step is not None, "begin_step comes first"
        q, k, v = reference.heads_of(qkv, num_kv_heads, self._layout.head_dim)
        about = (*rest, layer, self._step, self._layout, self._arena)
        return triton_attention.paged_attention(AttentionOperands._make((q, k, v, *about)), rotation)

    def exchange_experts(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        assert self.exchanges.experts is not None, "a model that holds some of its experts needs an exchange"
        self.exchanges.experts.fill(y, ids)

    def sum_over_ranks(self, y: torch.Tensor) -> None:
        assert self.exchanges.sums is not None, "a model of divided layers needs sums over its ranks"
        self.exchanges.sums.add_up(y)

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        assert self.exchanges.sums is not None
        return self.exchanges.sums.gather(logits, vocab_size)
