# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: captured once per shape, replayed as one launch, or in pieces.

Legend: T token rows, S sequences, B blocks of the longest sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from moe_lora.kernels.operands import StepBounds, StepTables
from moe_lora.lora.backend import LoraBackend
from moe_lora.lora.row_routing import RowRouting, Source

from .step_batch import RANK_STEP, Place, StepBatch, StepBuffer, with_places
from .step_pieces import Piece, StepCapture

logger = logging.getLogger(__name__)

FIRST_CONTEXT, CONTEXT_FACTOR = 1024, 4
"""Bounds of the longest sequence's tokens: attention programs beyond a step's own lengths end at once."""
Compute: TypeAlias = Callable[[StepBatch], torch.Tensor]


class GraphShape(NamedTuple):
    """Key of a graph.  rows: T = S, a decode bucket.  context: bound of a sequence's tokens. tokens: bound
    of all sequences' tokens.  places: sources of the rows' deltas; empty without deltas.
    """

    rows: int
    context: int
    tokens: int
    places: tuple[Place, ...]


class _Captured(NamedTuple):
    """pieces: graphs and calls of the host, in order.  memory: of the input buffer."""

    pieces: list[Piece]
    logits: torch.Tensor
    memory: torch.Tensor


class StepGraphs:
    """Computes decode steps without deltas, or with deltas from this device or `hosts`.

    rows: decode buckets.  places: of all deltas that an adapter may have.  site_ranks: largest rank of
    these slots at each site. kv_tokens: capacity of the arena. hosts: by source, the backends that cut a
    captured step (`HostCalled`).

    A step is padded to its shape and copied to the graph's input; launches are bounded by the context and
    by the ranks of adapters seen so far.  A larger rank makes graphs with deltas invalid.  Arena and slot
    tables never move. Sequences with shared pages may exceed the bound; such steps have separate graphs,
    captured at first use. All ranks of an instance capture the same shapes at the same steps, with matching
    exchanges. Steps with rows at hosts are replayed in pieces, others as one graph.  Rows of host workers
    stay there for the step, even if the adapter arrives. The first step of an uncaptured shape is computed
    twice, with the step's requests.
    """

    def __init__(
        self,
        buffer: StepBuffer,
        capture: StepCapture,
        site_ranks: Callable[[np.ndarray], list[int]],
        *,
        rows: Sequence[int],
        max_tokens: int,
        block_size: int,
        kv_tokens: int,
        places: tuple[Place, ...],
        hosts: Mapping[int, LoraBackend] | None = None,
    ) -> None:
        self.num_captured = self.num_replayed = 0
        self._buffer = buffer
        self._capture = capture
        self._site_ranks = site_ranks
        self._rows = sorted(rows)
        self._block_size = block_size
        self._kv_tokens = kv_tokens
        self._places = places
        self._hosts = dict(hosts or {})
        self._contexts = [max_tokens]
        while self._contexts[-1] > FIRST_CONTEXT:
            self._contexts.append(max(FIRST_CONTEXT, self._contexts[-1] // CONTEXT_FACTOR))
        self._contexts.reverse()
        self._ranks = site_ranks(np.array([-1]))
        self._graphs: dict[GraphShape, _Captured] = {}

    def shape_of(self, batch: StepBatch) -> GraphShape | None:
        """The graph for this step, or None."""
        routing, tables, num_rows = batch.routing, batch.tables, len(batch.tokens)
        if not tables.decode or num_rows not in self._rows:
            return None
        places = self._places_of(routing)
        if places is None or self._changes_embedding(routing):
            return None
        longest = int(tables.seq_lens.max())
        context = next((bound for bound in self._contexts if bound >= longest), None)
        if context is None:
            return None
        most = self._most_tokens(num_rows, context)
        tokens = most if int(tables.seq_lens.sum()) <= most else num_rows * context
        return GraphShape(num_rows, context, tokens, places)

    def _most_tokens(self, rows: int, context: int) -> int:
        """Bound for sequences without shared pages."""
        return min(rows * context, self._kv_tokens)

    def _places_of(self, routing: RowRouting) -> tuple[Place, ...] | None:
        """Sources of deltas; None if no graph has this combination."""
        groups, merged = set(range(len(routing.sources))), routing.terms.shape[2] > 1
        if merged:  # a merged adapter's sites form separate groups
            groups = {group for of_layer in routing.groups for group in of_layer}
            if routing.outer is not None:
                groups.add(routing.outer)
        places = tuple((s, group) for group in sorted(groups) for s in sorted(routing.sources[group]))
        # A graph has all sites of each captured group.
        if places and (merged or {s for s, _ in places} - {Source.LOCAL, Source.PUSHED} - self._hosts.keys()):
            return None
        return places

    def _changes_embedding(self, routing: RowRouting) -> bool:
        """True for rows with a delta of the embedding, whose launches depend on the adapters."""
        if routing.outer is None:
            return False
        return self._site_ranks(routing.terms_from(Source.LOCAL, routing.outer)["slot"])[-1] > 0

    def run(self, shape: GraphShape, batch: StepBatch, compute: Compute) -> torch.Tensor:
        """The batch's logits, valid until the next step.  compute: launches a step on the device."""
        for slots in batch.routing.slots_here().values():
            self._admit(self._site_ranks(slots))
        inputs = self._padded(shape, batch).through(self._buffer, self._bounds(shape))
        graph = self._graphs.get(shape)
        if graph is None or graph.memory is not self._buffer.memory:
            graph = self._captured(shape, inputs, compute)
        for source in self._hosts.keys() & {source for source, _ in shape.places}:
            self._hosts[source].begin_step(inputs.tables, inputs.routing)
        for piece in graph.pieces:
            piece()
        self.num_replayed += 1
        wanted = batch.logit_rows
        if torch.equal(wanted, torch.arange(len(wanted))):
            return graph.logits[: len(wanted)]
        return graph.logits.index_select(0, wanted.pin_memory().to(graph.logits.device, non_blocking=True))

    def warm_up(self, empty: Callable[[int], StepBatch], compute: Compute, ranks: Sequence[int]) -> None:
        """Capture all shapes.  empty: returns a batch of padding rows.  ranks: of adapters to come, the
        largest at each site.
        """
        self._admit(ranks)
        kinds: list[tuple[Place, ...]] = [(), self._places] if any(self._ranks) else [()]
        bounds = [(r, c, self._most_tokens(r, c)) for r in self._rows for c in self._contexts]
        shapes = [GraphShape(*bound, places) for bound in bounds for places in kinds]
        for shape in reversed(shapes):  # the largest first, so that the buffer stays
            batch = empty(shape.rows)
            if shape.places:
                batch = replace(batch, routing=with_places(batch, shape.places))
            inputs = self._padded(shape, batch).through(self._buffer, self._bounds(shape))
            self._captured(shape, inputs, compute)
        logger.info("captured %d decode steps as graphs", len(shapes))

    def _admit(self, ranks: Sequence[int]) -> None:
        bounds = [max(b, -(-r // RANK_STEP) * RANK_STEP) for b, r in zip(self._ranks, ranks, strict=True)]
        if bounds != self._ranks:
            self._ranks = bounds
            self._graphs = {
                shape: graph
                for shape, graph in self._graphs.items()
                if Source.LOCAL not in (source for source, _ in shape.places)
            }

    def _bounds(self, shape: GraphShape) -> StepBounds:
        return StepBounds(
            has_single=True, has_several=False, longest_single=shape.context, single_tokens=shape.tokens
        )

    def _padded(self, shape: GraphShape, batch: StepBatch) -> StepBatch:
        tables = batch.tables
        blocks = torch.zeros(shape.rows, -(-shape.context // self._block_size), dtype=torch.int32)
        known = tables.block_tables[:, : blocks.shape[1]]
        blocks[:, : known.shape[1]] = known
        routing = replace(batch.routing, site_ranks=self._ranks if shape.places else None)
        if routing.loading.any():  # a capture fixes the source of each row
            here = np.zeros((len(routing.terms) - 1, len(routing.groups)), dtype=bool)
            routing = replace(routing, here=here)
        return replace(
            batch,
            logit_rows=torch.arange(shape.rows),
            tables=StepTables(
                query_start=tables.query_start, seq_lens=tables.seq_lens, block_tables=blocks, decode=True
            ),
            routing=routing,
        )

    def _captured(self, shape: GraphShape, inputs: StepBatch, compute: Compute) -> _Captured:
        pieces, logits = self._capture(lambda: compute(inputs))
        graph = self._graphs[shape] = _Captured(pieces, logits, self._buffer.memory)
        self.num_captured += 1
        return graph
