"""What stands behind an engine's channels: the arena, the current step, and the LoRA backend."""

from __future__ import annotations

import itertools

import torch

from moe_lora.kernels.cpu import cpu
from moe_lora.kernels import ops
from moe_lora.kernels import reference
from moe_lora.kernels.operands import KvLayout, StepTables

from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.engine.ranks.exchange import ExpertExchange
from moe_lora.lora.row_routing import RowRouting

_NO_DELTA = 0


class ExecutionContext:
    """Answers the channel operations of one model instance (`kernels.ops.ChannelHandler`).

    `channels[l]` is what layer l passes to its operations.  exchange: how this rank gets the outputs of
    experts that other ranks hold; None where it holds all.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KvLayout,
        backend: LoraBackend,
        exchange: ExpertExchange | None = None,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self.backend = backend
        self.exchange = exchange
        self._step: StepTables | None = None
        self._tickets = itertools.count(_NO_DELTA + 1)
        self._begun: dict[int, AddTo] = {}
        self.channels = ops.open_channels(self, layout.num_layers)

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the batch that the operations work on."""
        assert not self._begun, "a ticket of the last step was never redeemed"
        self._step = step
        self.backend.begin_step(step, routing)

    def lora_begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """A ticket, int64 [1] on the CPU so that it passes through compiled code; redeemed exactly once."""
        add_to = self.backend.begin(layer, site, x, ids)
        if add_to is None:
            return torch.tensor([_NO_DELTA])
        ticket = next(self._tickets)
        self._begun[ticket] = add_to
        return torch.tensor([ticket])

    def lora_add_to(self, ticket: torch.Tensor, y: torch.Tensor) -> None:
        number = int(ticket.item())
        if number != _NO_DELTA:
            self._begun.pop(number)(y)

    def paged_attention(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        assert self._step is not None, "begin_step comes first"
        attend = cpu.paged_attention if q.is_cpu else reference.paged_attention
        return attend(q, k, v, sinks, scale, window, layer, self._step, self._layout, self._arena)

    def exchange_experts(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        assert self.exchange is not None, "a model that holds some of its experts needs an exchange"
        self.exchange.fill(y, ids)
