# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: captured once for each shape, replayed as one launch, or in pieces.

Legend: T token rows, S sequences, B blocks of the longest sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from moe_lora.kernels.operands import StepBounds, StepTables
from moe_lora.lora.backend import LoraBackend
from moe_lora.lora.row_routing import RowRouting, Source

from .step_batch import StepBatch
from .step_buffer import StepBuffer
from .step_pieces import Piece, StepCapture

logger = logging.getLogger(__name__)

FIRST_CONTEXT, CONTEXT_FACTOR = 1024, 4
"""Bounds of the longest sequence's tokens: attention's programs beyond a step's own lengths end at once."""
RANK_STEP = 64
"""Bounds of ranks are multiples of it, as workspaces are."""


@dataclass(frozen=True)
class CaptureSteps:
    """Have all ranks capture all shapes, each in the same order.  ranks: the largest at each site of adapters
    to come."""

    ranks: tuple[int, ...]


Place: TypeAlias = tuple[int, int]
"""Source and group of sites (see `RowRouting.sources`)."""
Compute: TypeAlias = Callable[[StepBatch], torch.Tensor]


class GraphShape(NamedTuple):
    """What a graph is captured for.  rows: T = S, a decode bucket.  context: bound of tokens of a sequence.
    tokens: bound of those of all.  places: where its rows' deltas come from; none where they have none."""

    rows: int
    context: int
    tokens: int
    places: tuple[Place, ...]


class _Captured(NamedTuple):
    """pieces: graphs and calls of the host, in order.  memory: that of the buffer which they read."""

    pieces: list[Piece]
    logits: torch.Tensor
    memory: torch.Tensor


class StepGraphs:
    """Computes decode steps whose deltas, if any, come from this device or from `hosts`; others are left to
    the caller.

    rows: decode buckets.  places: of all deltas that an adapter may have.  site_ranks: largest rank of these
    slots at each site.  A step is padded to its shape and copied to where the graph reads it; what a launch
    depends on besides is bounded: lengths by the context, ranks by those of adapters seen so far.  An adapter
    beyond them has the graphs with deltas captured anew, each when it is next needed.  Arena and slot tables
    never move.
    kv_tokens: that the arena holds.  Sequences that share pages may have more in all; such steps have graphs
    of their own, captured when they are first needed.
    Several ranks of an instance capture the same shapes at the same steps, since what decides it, the step
    and its adapters' ranks, is the same for all: what one exchanges while it captures, the others do too.
    hosts: by source the backends that cut a captured step (`HostCalled`).  Steps in which they have rows are
    replayed in pieces, all others as one graph.  A row of host workers stays theirs in such a step, whatever
    of its adapter has come meanwhile.  The first step of a shape that was not captured ahead is computed
    twice, its requests included.
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
        """The graph that computes this step; None: none does."""
        routing, tables, num_rows = batch.routing, batch.tables, len(batch.tokens)
        if not tables.decode or num_rows not in self._rows:
            return None
        places = self._places_of(routing)
        if places is None:
            return None
        longest = int(tables.seq_lens.max())
        context = next((bound for bound in self._contexts if bound >= longest), None)
        if context is None:
            return None
        most = self._most_tokens(num_rows, context)
        tokens = most if int(tables.seq_lens.sum()) <= most else num_rows * context
        return GraphShape(num_rows, context, tokens, places)

    def _most_tokens(self, rows: int, context: int) -> int:
        """Of sequences that share no pages."""
        return min(rows * context, self._kv_tokens)

    def _places_of(self, routing: RowRouting) -> tuple[Place, ...] | None:
        """Where deltas come from; None where no graph has them so."""
        groups, merged = set(range(len(routing.sources))), routing.terms.shape[2] > 1
        if merged:  # sites of which the weights carry an adapter are groups of their own
            groups = set().union(*routing.groups)
        places = tuple((s, group) for group in sorted(groups) for s in sorted(routing.sources[group]))
        # A graph has the sites of each group that it was captured with.
        if places and (merged or {s for s, _ in places} - {Source.LOCAL, Source.PUSHED} - self._hosts.keys()):
            return None
        return places

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
        """Capture all shapes.  empty: a batch of so many padding rows.  ranks: of adapters to come, the
        largest at each site."""
        self._admit(ranks)
        kinds: list[tuple[Place, ...]] = [(), self._places] if any(self._ranks) else [()]
        bounds = [(r, c, self._most_tokens(r, c)) for r in self._rows for c in self._contexts]
        shapes = [GraphShape(*bound, places) for bound in bounds for places in kinds]
        for shape in reversed(shapes):  # the largest first: the buffer stays where it then is
            batch = empty(shape.rows)
            if shape.places:
                batch = replace(batch, routing=with_places(batch, shape.places))
            inputs = self._padded(shape, batch).through(self._buffer, self._bounds(shape))
            self._captured(shape, inputs, compute)
        logger.info("captured %d decode steps as graphs", len(shapes))

    def _admit(self, ranks: Sequence[int]) -> None:
        """Have graphs serve adapters of these ranks."""
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
        """The step as the graph takes it: logits of all rows, blocks up to its context."""
        tables = batch.tables
        blocks = torch.zeros(shape.rows, -(-shape.context // self._block_size), dtype=torch.int32)
        known = tables.block_tables[:, : blocks.shape[1]]
        blocks[:, : known.shape[1]] = known
        routing = replace(batch.routing, site_ranks=self._ranks if shape.places else None)
        if routing.loading.any():  # who computes a row is settled when a graph is captured
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


def with_places(batch: StepBatch, places: Sequence[Place]) -> RowRouting:
    """The batch's routing, as if a row had terms at these places: one more route, which no row has."""
    terms = np.concatenate([batch.routing.terms[-1:], batch.routing.terms])
    for source, group in places:
        terms["source"][0, group, 0] = source
    return replace(batch.routing, terms=terms)
