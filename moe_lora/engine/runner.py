"""Turns a scheduled step into tensors and runs the model on them.

Legend: T token rows, S sequences, B blocks of the longest sequence.
"""

from __future__ import annotations

import io
import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.ranks.exchange import ExpertExchange
from moe_lora.kernels import ops, reference
from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.operands import AttentionOperands, KvLayout, StepTables
from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.lora.row_routing import Lease, RoutedAdapter, RowRouting, Source, content_number, no_terms
from moe_lora.models.causal_lm import CausalLM, DecoderLayer, LayerForward
from moe_lora.scheduling.views import Scheduled

from .merging import MergedWeights, MergeOrder
from .sequence import Sequence

# One step's input, as the ranks of an instance pass it on.
#
# Legend: T token rows.


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Tensors on the host until `to`.

    tokens, positions: [T] int64.  logit_rows: int64, rows whose logits are wanted.  num_live: rows from
    there on are padding.  routing: where the rows' deltas are computed.  compiled: whether a graph runs the
    layers.  any_rows: mark that graph as good for any number of rows.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    num_live: int
    tables: StepTables
    routing: RowRouting
    compiled: bool
    any_rows: bool

    def to(self, device: torch.device) -> StepBatch:
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            logit_rows=self.logit_rows.to(device, non_blocking=True),
            tables=self.tables.to(device),
        )


class _Pickler(pickle.Pickler):
    """Host tensors travel as numpy arrays: torch's own way costs a storage object for each."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def packed_message(message: Any) -> bytes:
    """The message, host tensors anywhere in it included, as one buffer that `pickle.loads` reads."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


# What stands behind an engine's channels: the arena, the current step, and the LoRA backend.


_NO_DELTA = 0


class ExecutionContext:
    """Answers the channel operations of one model instance (see `kernels.ops`).

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

    def paged_attention(self, layer: int, *operands: Any) -> torch.Tensor:
        """operands: q to window of `AttentionOperands`."""
        assert self._step is not None, "begin_step comes first"
        attention = AttentionOperands._make((*operands, layer, self._step, self._layout, self._arena))
        attend = cpu.paged_attention if attention.q.is_cpu else reference.paged_attention
        return attend(attention)

    def exchange_experts(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        assert self.exchange is not None, "a model that holds some of its experts needs an exchange"
        self.exchange.fill(y, ids)


logger = logging.getLogger(__name__)
_NO_LEASE = Lease(-1, 0)
_COUNTED = (Source.LOCAL, Source.LEASED, Source.HOST)


class ModelRunner:
    """Runs steps of one model.

    decode_buckets: batch sizes that decode steps are padded to; empty = none.  announce: told of each batch
    before it is computed, for the ranks that compute it too.  site_sources: who computes the deltas of each
    site, in all layers.  What is LOCAL there is HOST for adapters that are on their way; num_taken_over: see
    `RoutedBackend`.  present: [slots, layers] bool, what is on the device; given where other ranks follow,
    which compute each layer of an adapter where this one found it when the batch was made.
    """

    def __init__(
        self,
        model: CausalLM,
        context: ExecutionContext,
        device: torch.device,
        site_sources: Seq[Source],
        *,
        num_taken_over: Callable[[], int] = int,
        present: np.ndarray | None = None,
        eager: bool,
        decode_buckets: Seq[int],
        announce: Callable[[StepBatch | MergeOrder], None] | None = None,
        merged: MergedWeights | None = None,
    ) -> None:
        self.merged = merged
        self._model = model
        self._context = context
        self._device = device
        self._eager = eager
        self._buckets = sorted(decode_buckets)
        self._lora_rows: Counter[Source] = Counter()
        self._num_taken_over = num_taken_over
        self._present = present
        self._announce = announce
        self._sources = sorted(set(site_sources))
        groups = tuple(self._sources.index(source) for source in site_sources)
        self._groups = (groups,) * len(context.channels)
        self._compiled: LayerForward = DecoderLayer.__call__
        if not eager:
            torch._dynamo.config.recompile_limit = max(64, 4 * len(self._buckets))
            self._compiled = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False)

    def lora_rows(self) -> dict[str, int]:
        """Fields of `EngineStats`: rows x layers by the source of their deltas, so far."""
        moved = Counter({Source.LOCAL: self._num_taken_over(), Source.HOST: -self._num_taken_over()})
        return {f"lora_rows_{s.name.lower()}": int(self._lora_rows[s] + moved[s]) for s in _COUNTED}

    def warm_up(self) -> None:
        """Compile every graph that steps will need, before the first request."""
        if self._eager:
            return
        sizes = self._buckets or [1, 2]
        logger.info("compiling decode steps for %s rows", "any number of" if not self._buckets else sizes)
        for size in sizes:
            self._run(self._batch([], size, any_rows=not self._buckets and size > 1))

    def run(self, plan: Seq[Scheduled[Sequence]]) -> torch.Tensor:
        """Compute the planned tokens; logits [number of sampling sequences, vocab] fp32 in plan order."""
        num_rows = sum(item.num_tokens for item in plan)
        if num_rows == len(plan):  # all decode
            num_rows = next((size for size in self._buckets if size >= num_rows), num_rows)
        return self._run(self._batch(plan, num_rows))

    def _run(self, batch: StepBatch) -> torch.Tensor:
        if self._announce is not None:
            self._announce(replace(batch, logit_rows=batch.logit_rows[:0]))
        return self.execute(batch)

    def swap(self, order: MergeOrder) -> None:
        """Have the weights of all ranks carry more of an adapter, or less, before the next step."""
        assert self.merged is not None
        if self._announce is not None:
            self._announce(order)
        self.merged.carry_out(order)

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> torch.Tensor:
        """Logits of the batch's `logit_rows`, [rows, vocab] fp32."""
        batch = batch.to(self._device)
        self._context.begin_step(batch.tables, batch.routing)
        live = torch.arange(len(batch.tokens), device=self._device) < batch.num_live
        layer_forward = self._compiled if batch.compiled else DecoderLayer.__call__
        if batch.any_rows:
            layer_forward = _marking_rows_dynamic(layer_forward)
        rows = (batch.tokens, batch.positions, live, batch.logit_rows)
        return self._model(*rows, self._context.channels, layer_forward)

    def _batch(self, plan: Seq[Scheduled[Sequence]], num_rows: int, *, any_rows: bool = False) -> StepBatch:
        """The plan's rows, then padding, each row of which is a sequence of its own (seq_lens 0)."""
        num_live = sum(item.num_tokens for item in plan)
        counts = [item.num_tokens for item in plan] + [1] * (num_rows - num_live)
        decode = num_live == len(plan)
        tokens, positions = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        seq_lens = np.zeros(len(counts), dtype=np.int32)
        max_blocks = max((len(item.sequence.table.pages) for item in plan), default=1)
        block_tables = np.zeros((len(counts), max_blocks), dtype=np.int32)
        logit_rows, row = [], 0
        for index, item in enumerate(plan):
            sequence, start, first_row = item.sequence, item.sequence.num_computed, row
            end, row = start + item.num_tokens, row + item.num_tokens
            tokens[first_row:row] = sequence.tokens[start:end]
            positions[first_row:row] = np.arange(start, end)
            block_tables[index, : len(sequence.table.pages)] = sequence.table.pages
            seq_lens[index] = end
            if item.samples:
                logit_rows.append(row - 1)
        return StepBatch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            logit_rows=torch.from_numpy(np.array(logit_rows, dtype=np.int64)),
            num_live=num_live,
            tables=StepTables(
                query_start=torch.from_numpy(query_start),
                seq_lens=torch.from_numpy(seq_lens),
                block_tables=torch.from_numpy(block_tables),
                decode=decode,
            ),
            routing=self._routing(plan, counts),
            # Without buckets a graph runs any step, with buckets a decode step of a bucket.
            compiled=not self._eager and (not self._buckets or (decode and num_rows in self._buckets)),
            any_rows=any_rows,
        )

    def _routing(self, plan: Seq[Scheduled[Sequence]], counts: Seq[int]) -> RowRouting:
        """Rows of an adapter take its slot or its lease, whichever each group of sites is computed from.

        counts: rows of each sequence, padding ones included.
        """
        routes: dict[AdapterVersion, int] = {}
        of_items = [
            -1 if item.sequence.adapter is None else routes.setdefault(item.sequence.adapter, len(routes))
            for item in plan
        ]
        of_items += [-1] * (len(counts) - len(plan))
        row_route = np.array(of_items, dtype=np.int32).repeat(counts)
        merged = self._merged_route(routes)
        beside_weights = row_route >= 0
        if self.merged is not None and self.merged.is_whole:
            beside_weights &= row_route != merged
        terms = no_terms(len(routes), len(self._sources))
        adapters: list[RoutedAdapter] = []
        cold = [n for a, n in routes.items() if a.slot is None and a.loading_slot is not None]
        for group, source in enumerate(self._sources if routes else ()):
            term = terms[:-1, group, 0]
            term["source"] = source
            if source == Source.LOCAL:
                term["slot"] = [-1 if adapter.slot is None else adapter.slot for adapter in routes]
                if cold:
                    adapters = self._route_to_host(term, list(routes), cold)
            else:
                leases = [adapter.lease or _NO_LEASE for adapter in routes]
                term["slot"] = [lease.slot for lease in leases]
                term["generation"] = [lease.generation for lease in leases]
                term["adapter"] = range(len(routes))
                adapters = [RoutedAdapter(a.packed.content_hash, a.packed.targets) for a in routes]
            self._lora_rows[source] += np.count_nonzero(beside_weights) * len(self._groups)
        routing = RowRouting(groups=self._groups, row_route=row_route, terms=terms, adapters=adapters)
        if cold:
            self._count_cold(row_route, cold)
            if self._present is not None:
                here = np.zeros((len(routes), len(self._groups)), dtype=bool)
                for route, slot in routing.loading_slots.items():
                    here[route] = self._present[slot]
                routing = replace(routing, here=here)
        if self.merged is None or not self.merged.any_merged:
            return routing
        return self.merged.corrected(routing, self._sources, merged, sum(counts[: len(plan)]))

    def _merged_route(self, routes: Mapping[AdapterVersion, int]) -> int:
        """That of the adapter which the weights carry some of; -1 if it has none."""
        carried = None if self.merged is None else self.merged.adapter
        if carried is None:
            return -1
        return next((number for adapter, number in routes.items() if adapter.uid == carried.uid), -1)

    def _count_cold(self, row_route: np.ndarray, cold: Seq[int]) -> None:
        """Rows of these routes are the host's, not the device's."""
        num_rows = np.count_nonzero(np.isin(row_route, cold)) * len(self._groups)
        self._lora_rows[Source.LOCAL] -= num_rows
        self._lora_rows[Source.HOST] += num_rows

    def _route_to_host(
        self, term: np.ndarray, adapters: Seq[AdapterVersion], cold: Seq[int]
    ) -> list[RoutedAdapter]:
        """Have host workers compute what is not on the device; the adapters as they know them."""
        for route in cold:
            adapter = adapters[route]
            number = content_number(adapter.packed.content_hash)
            term[route] = (Source.HOST, route, adapter.loading_slot, number)
        return [RoutedAdapter(a.packed.content_hash, a.packed.targets) for a in adapters]


def _marking_rows_dynamic(layer_forward: LayerForward) -> LayerForward:
    """Run a layer so that its graph is compiled for any number of rows above one."""

    def run(layer: DecoderLayer, x: torch.Tensor, channel: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        for tensor in (x, *rows):
            torch._dynamo.mark_dynamic(tensor, 0)
        return layer_forward(layer, x, channel, *rows)

    return run
