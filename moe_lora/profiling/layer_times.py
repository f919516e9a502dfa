# SPDX-License-Identifier: Apache-2.0
"""Times of one layer on this machine, for `moe-lora profile`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.transport import make_transport
from moe_lora.engine.ranks.rank import Rank
from moe_lora.engine.step.execution_context import ExecutionContext
from moe_lora.kernels.lora import lora_delta
from moe_lora.kernels.operands import LoraOperands, SlotTable, StepTables
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import local_routing
from moe_lora.models.causal_lm import DecoderLayer

from .step_times import random_adapter

_REPEATS = 7
_LAYER = 0
_EXPERT_SITES = ("gate_up", "down")


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Median seconds of one layer by batch; server stages by EP degree."""

    attention_s: list[float]
    experts_s: list[float]
    receive_s: dict[int, list[float]]
    compute_s: dict[int, list[float]]
    send_s: dict[int, list[float]]
    load_bytes_per_s: float


class LayerClock:
    """One layer with experts, timed at any batch up to the largest.

    zipf: of the rows' adapters.  context_tokens: KV per row.  Raises ConfigError without experts.
    """

    def __init__(
        self,
        config: EngineConfig,
        batches: tuple[int, ...],
        *,
        lora_rank: int,
        num_adapters: int,
        zipf: float,
        context_tokens: int,
    ) -> None:
        self._rank = Rank(config)
        self.shape, self.device, self.dtype = self._rank.shape, self._rank.device, self._rank.dtype
        if not self.shape.num_experts:
            raise ConfigError("this model has no experts; profiles hold times of models with experts")
        self.shape.check_equal_layers("a profile of layers")
        self._batches, self._context_tokens = batches, context_tokens
        self._generator = torch.Generator().manual_seed(0)
        weights = torch.arange(1, num_adapters + 1, dtype=torch.float64) ** -zipf
        self._token_slots = torch.multinomial(
            weights, batches[-1], replacement=True, generator=self._generator
        )
        draws = torch.rand(batches[-1], self.shape.num_experts, generator=self._generator)
        self._ids = draws.topk(self.shape.num_experts_per_token).indices.sort(1).values.int()
        self._slots, self._adapters = self._random_adapters(lora_rank, num_adapters)

    @torch.inference_mode()
    def measure(self) -> LayerTimes:
        """Every stage at every batch."""
        base = [self._base(batch) for batch in self._batches]
        degrees = [ep for ep in (1, 2, 4, 8) if self.shape.num_experts % ep == 0]
        receive, send = self._transfers(degrees)
        return LayerTimes(
            attention_s=[attention for attention, _ in base],
            experts_s=[experts for _, experts in base],
            receive_s=receive,
            compute_s={ep: [self._compute(batch, ep) for batch in self._batches] for ep in degrees},
            send_s=send,
            load_bytes_per_s=self._load_rate(),
        )

    def _base(self, batch: int) -> tuple[float, float]:
        """Seconds of (attention, MLP with gate) without adapters, not compiled."""
        layout, model = self._rank.layout, self._rank.model
        blocks = -(-self._context_tokens // layout.block_size)
        arena = torch.zeros(batch * blocks * layout.page_bytes, dtype=torch.uint8, device=self.device)
        context = ExecutionContext(arena, layout, LocalBackend(self.shape, arena, self._slots))
        context.begin_step(
            self._tables(batch, blocks), local_routing(self.shape, np.full(batch, -1, dtype=np.int32))
        )
        layer, channel = model.layers[_LAYER], context.channels[_LAYER]
        assert isinstance(layer, DecoderLayer)
        x = self._random(batch, self.shape.hidden_size)
        live = torch.ones(batch, dtype=torch.bool, device=self.device)
        cos, sin = model.rope(torch.full((batch,), self._context_tokens - 1, device=self.device))
        attention = self._seconds(lambda: layer.attention(layer.attention_norm(x), channel, cos, sin))
        return attention, self._seconds(lambda: layer.mlp(layer.mlp_norm(x), channel, live))

    def _compute(self, batch: int, ep: int) -> float:
        """Seconds of gate/up and down deltas with the first E / ep experts."""
        ids, slots = self._ids[:batch], self._token_slots[:batch].int().to(self.device)
        held = torch.where(ids < self.shape.num_experts // ep, ids, -1).to(self.device)
        work = []
        for name in _EXPERT_SITES:
            site, rows = self.shape.site(name), held.numel()
            x = self._random(batch if name == "gate_up" else rows, site.in_features)
            out = self._random(rows, site.total_out_features)
            work.append((LoraOperands(x, held, site, _LAYER, slots, self._slots, self._adapters), out))

        def deltas() -> None:
            for operands, out in work:
                lora_delta(operands, out)

        return self._seconds(deltas)

    def _transfers(self, degrees: list[int]) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        """Seconds of puts: a rank's inputs, and deltas."""
        shape, itemsize = self.shape, self.dtype.itemsize
        routed = shape.num_experts_per_token
        per_row_in = {ep: shape.hidden_size + routed * shape.intermediate_size / ep for ep in degrees}
        per_row_out = {ep: routed * (shape.hidden_size + 2 * shape.intermediate_size) / ep for ep in degrees}
        largest = int(max(*per_row_in.values(), *per_row_out.values()) * self._batches[-1] + 1) * itemsize
        data, value = torch.ones(largest, dtype=torch.uint8), 0
        with make_transport("shm", name="profile/0") as transport:
            window = transport.alloc("profile", largest, 1)
            remote = transport.attach(window.descriptor())

            def put(num_bytes: int) -> None:
                nonlocal value
                value += 1
                transport.put_signal(remote, 0, data[:num_bytes], 0, value)
                transport.quiet(remote)

            def times(per_row: float) -> list[float]:
                sizes = [int(batch * per_row) * itemsize for batch in self._batches]
                return [self._seconds(lambda size=size: put(size)) for size in sizes]  # type: ignore[misc]

            receive = {ep: times(per_row_in[ep]) for ep in degrees}
            return receive, {ep: times(per_row_out[ep]) for ep in degrees}

    def _load_rate(self) -> float:
        host = torch.ones(self._adapters.numel(), dtype=torch.uint8)
        return host.numel() / self._seconds(lambda: self._adapters.copy_(host))

    def _random_adapters(self, lora_rank: int, num_adapters: int) -> tuple[SlotTable, torch.Tensor]:
        adapter = random_adapter(self.shape, self.dtype, "", lora_rank, seed=0, targets=_EXPERT_SITES)
        layer = adapter.layers[_LAYER]
        arena = layer.data.repeat(num_adapters).to(self.device).view(torch.uint8)
        slots = SlotTable(num_adapters, self.shape.num_layers, self.shape.num_entries, self.device)
        for slot in range(num_adapters):
            where = range(slot * layer.nbytes, (slot + 1) * layer.nbytes)
            slots.write_layer(slot, _LAYER, layer.table, layer.scale, self.dtype.itemsize, where)
        return slots, arena

    def _tables(self, batch: int, blocks: int) -> StepTables:
        def counting(count: int) -> torch.Tensor:
            return torch.arange(count, dtype=torch.int32)

        tables = StepTables(
            query_start=counting(batch + 1),
            seq_lens=torch.full((batch,), self._context_tokens, dtype=torch.int32),
            block_tables=counting(batch * blocks).view(batch, blocks),
            decode=True,
        )
        return tables.to(self.device)

    def _random(self, *size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=self._generator) * 0.02).to(self.device, self.dtype)

    def _seconds(self, work: Callable[[], object]) -> float:
        found = []
        for _ in range(_REPEATS + 1):
            self._synchronize()
            start = time.perf_counter()
            work()
            self._synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
