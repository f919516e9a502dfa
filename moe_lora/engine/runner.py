"""Turns a scheduled step into tensors and runs the model on them.

Legend: T token rows, S sequences, B blocks of the longest sequence.
"""

from __future__ import annotations

import io
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
from moe_lora.engine.ranks.exchange import ExpertExchange, RankSums
from moe_lora.kernels import ops, reference
from moe_lora.kernels.cpu import cpu, step_calls
from moe_lora.kernels.cpu.site_linear import SiteLinear
from moe_lora.kernels.cpu.step_calls import StepCalls
from moe_lora.kernels.operands import AttentionOperands, KvLayout, StepBounds, StepTables
from moe_lora.kernels.quantised import QuantisedOperand
from moe_lora.kernels.triton import triton_attention
from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.lora.row_routing import Lease, RoutedAdapter, RowRouting, Source, content_number, no_terms
from moe_lora.models.causal_lm import CausalLM, DecoderLayer, LayerForward, numbered_from
from moe_lora.models.compiled_layers import CompiledLayers
from moe_lora.scheduling.views import Scheduled

from .merged_weights import MergedWeights, MergeOrder
from .sequence import Sequence
from .step_buffer import StepBuffer
from .step_graphs import StepGraphs

# One step's input, as the ranks of an instance pass it on.
#
# Legend: T token rows.


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Tensors on the host until they went `through` a buffer.

    tokens, positions: [T] int64.  live: [T] bool, False for padding.  logit_rows: int64, rows whose logits
    are wanted.  routing: where the rows' deltas are computed.  compiled: whether compiled code runs the
    layers.  any_rows: mark that code as good for any number of rows.  drawn: tokens of the step before, on
    the device: token -1 - i is number i of them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor
    logit_rows: torch.Tensor
    tables: StepTables
    routing: RowRouting
    compiled: bool
    any_rows: bool
    drawn: torch.Tensor | None = None

    def with_drawn(self) -> StepBatch:
        """The same, its tokens taken from `drawn` where they come from there."""
        if self.drawn is not None and len(self.drawn):  # a step that samples nothing draws nothing
            number = (-1 - self.tokens).clamp(min=0)
            self.tokens.copy_(torch.where(self.tokens < 0, self.drawn.index_select(0, number), self.tokens))
        return self

    def through(self, buffer: StepBuffer, bounds: StepBounds | None = None) -> StepBatch:
        """The same on the buffer's device, and there too the slots of the rows that it computes.

        bounds: what launches are made for; None: the step's own lengths.
        """
        tables, slots = self.tables, self.routing.slots_here()
        lengths = (tables.query_start, tables.seq_lens)
        arrays = [self.tokens, self.positions, self.live, self.logit_rows, *lengths, tables.block_tables]
        tokens, positions, live, logit_rows, query_start, seq_lens, block_tables, *row_slots = buffer.fill(
            [*(array.numpy() for array in arrays), *slots.values()]
        )
        return replace(
            self,
            tokens=tokens,
            positions=positions,
            live=live,
            logit_rows=logit_rows,
            tables=StepTables(
                query_start=query_start,
                seq_lens=seq_lens,
                block_tables=block_tables,
                decode=tables.decode,
                bounds=bounds or StepBounds.of(*lengths),
            ),
            routing=replace(self.routing, on_device=dict(zip(slots, row_slots, strict=True))),
        ).with_drawn()


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


class ExecutionContext:
    """Answers the channel operations of one model instance (see `kernels.ops`).

    `channels[l]` is what layer l passes to its operations.  exchange: how this rank gets the outputs of
    experts that other ranks hold; None where it holds all.  sums: how it adds up with them what each has a
    part of; None where nothing is divided so.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KvLayout,
        backend: LoraBackend,
        exchange: ExpertExchange | None = None,
        sums: RankSums | None = None,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self.backend = backend
        self.exchange = exchange
        self.sums = sums
        self._step: StepTables | None = None
        self._begun: dict[tuple[int, int], AddTo] = {}
        self._linears: dict[tuple[int, int], SiteLinear] = {}
        self._attention: cpu.StepAttention | None = None
        self._calls = StepCalls(layout.num_layers) if arena.is_cpu and step_calls.are_built else None
        self.channels = ops.open_channels(self, layout.num_layers, self._calls)

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Make `step` the batch that the operations work on."""
        assert not self._begun, "a site of the last step was begun, and its deltas were never added"
        self._step = step
        self._attention = None
        if self._arena.is_cpu:
            self._attention = cpu.StepAttention(step, self._layout, self._arena)
        self.backend.begin_step(step, routing)
        if self._calls is not None and self._attention is not None:
            first, same = routing.groups[0], routing.groups.count(routing.groups[0]) == len(routing.groups)
            rows = [self.backend.rows_here(0, site) for site in range(len(first))] if same else []
            self._calls.begin_step(rows, self._attention)

    def lora_begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> None:
        add_to = self.backend.begin(layer, site, x, ids)
        if add_to is not None:
            self._begun[layer, site] = add_to

    def lora_add_to(self, layer: int, site: int, y: torch.Tensor) -> None:
        if self.has_deltas(layer, site):
            self._begun.pop((layer, site))(y)

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
        """Base layer and deltas of a site: one call of the CPU library where the deltas are computed here.

        ids: numbered in the whole model.  first_expert: number there of the weight's first one.  Scales and
        bias stay with the weight.
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

    def has_deltas(self, layer: int, site: int) -> bool:
        """Whether `lora_add_to` would do anything."""
        return (layer, site) in self._begun

    def paged_attention(self, layer: int, *operands: Any) -> torch.Tensor:
        """operands: q to window of `AttentionOperands`."""
        if self._attention is not None:
            return self._attention(layer, *operands)
        assert self._step is not None, "begin_step comes first"
        attention = AttentionOperands._make((*operands, layer, self._step, self._layout, self._arena))
        on_cuda = attention.q.device.type == "cuda"
        attend = triton_attention.paged_attention if on_cuda else reference.paged_attention
        return attend(attention)

    def exchange_experts(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        assert self.exchange is not None, "a model that holds some of its experts needs an exchange"
        self.exchange.fill(y, ids)

    def sum_over_ranks(self, y: torch.Tensor) -> None:
        assert self.sums is not None, "a model of divided layers needs sums over its ranks"
        self.sums.add_up(y)

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        assert self.sums is not None
        return self.sums.gather(logits, vocab_size)


logger = logging.getLogger(__name__)
_NO_LEASE = Lease(-1, 0)
_COUNTED = (Source.LOCAL, Source.LEASED, Source.HOST)


class ModelRunner:
    """Runs steps of one model.

    decode_buckets: batch sizes that decode steps are padded to; empty = none.  announce: told of each batch
    before it is computed, for the ranks that compute it too.  site_sources: who computes the deltas of each
    site, in all layers.  What is LOCAL there is HOST for adapters that are on their way; num_taken_over: see
    `RoutedBackend`.  present: [slots, layers] bool, what is on the device; given where other ranks follow,
    which compute each layer of an adapter where this one found it when the batch was made.  graphs: compute
    the steps that they can, whole.
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
        graphs: StepGraphs | None = None,
    ) -> None:
        self.merged = merged
        self._graphs = graphs
        self._model = model
        self._context = context
        self._device = device
        self._buffer = None if device.type == "cpu" else StepBuffer(device)
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
            self._compiled = CompiledLayers(len(self._buckets))

    def lora_rows(self) -> dict[str, int]:
        """Fields of `EngineStats`: rows x layers by the source of their deltas, so far."""
        moved = Counter({Source.LOCAL: self._num_taken_over(), Source.HOST: -self._num_taken_over()})
        return {f"lora_rows_{s.name.lower()}": int(self._lora_rows[s] + moved[s]) for s in _COUNTED}

    def warm_up(self, site_ranks: Seq[int] = ()) -> None:
        """Compile all code, and capture every graph, that steps will need, before the first request.

        site_ranks: the largest rank at each site of adapters to come.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.warm_up(lambda rows: self._batch([], rows), self._compute, site_ranks)
        if self._eager:
            return
        sizes = self._buckets or [1, 2]
        logger.info("compiling decode steps for %s rows", "any number of" if not self._buckets else sizes)
        for size in sizes:
            self._run(self._batch([], size, any_rows=not self._buckets and size > 1))

    def run(self, plan: Seq[Scheduled[Sequence]], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the planned tokens; logits [number of sampling sequences, vocab] fp32 in plan order.

        drawn: [S] int64, for sequences whose last token is expected (`Sequence.expect`).
        """
        num_rows = sum(item.num_tokens for item in plan)
        if num_rows == len(plan):  # all decode
            num_rows = next((size for size in self._buckets if size >= num_rows), num_rows)
        return self._run(replace(self._batch(plan, num_rows), drawn=drawn))

    def _run(self, batch: StepBatch) -> torch.Tensor:
        if self._announce is not None:
            # Other ranks compute logits only where each has a part of the vocabulary.
            whole_head = self._model.shard.tensor_parallel == 1
            self._announce(replace(batch, logit_rows=batch.logit_rows[:0]) if whole_head else batch)
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
        if self._graphs is not None and (shape := self._graphs.shape_of(batch)) is not None:
            return self._graphs.run(shape, batch, self._compute)
        return self._compute(batch.with_drawn() if self._buffer is None else batch.through(self._buffer))

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        """The same of a batch on the device."""
        self._context.begin_step(batch.tables, batch.routing)
        layer_forward = DecoderLayer.__call__
        if batch.compiled:
            layer_forward = self._compiled
        if batch.any_rows:
            layer_forward = _marking_rows_dynamic(layer_forward)
        rows = (batch.tokens, batch.positions, batch.live, batch.logit_rows)
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
        routing = self._routing(plan, counts)
        # Without buckets a graph runs any step, with buckets a decode step of a bucket.  Such a one waits for
        # no host: what looks like one may be the last token of a loading adapter's prompt.
        in_bucket = decode and num_rows in self._buckets and not routing.loading.any()
        return StepBatch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            logit_rows=torch.from_numpy(np.array(logit_rows, dtype=np.int64)),
            live=torch.from_numpy(np.arange(num_rows) < num_live),
            tables=StepTables(
                query_start=torch.from_numpy(query_start),
                seq_lens=torch.from_numpy(seq_lens),
                block_tables=torch.from_numpy(block_tables),
                decode=decode,
            ),
            routing=routing,
            compiled=not self._eager and (not self._buckets or in_bucket),
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
