# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs: captured once per shape, replayed as one launch, or in pieces.

Legend: T token rows, S sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from moe_lora.kernels.operands import StepBounds, StepTables
from moe_lora.lora.backend import LoraBackend
from moe_lora.lora.row_routing import RowRouting, Source

from .step_batch import RANK_STEP, Place, StepBatch, StepBuffer, with_places
from .step_pieces import Piece, StepCapture

logger = logging.getLogger(__name__)

FIRST_CONTEXT, CONTEXT_FACTOR = 1024, 4
"""Bounds of contexts: attention programs beyond a step's own lengths end at once."""
PROMPT_CONTEXT = 8192
"""The smallest bound with prompts, for fewer graphs."""
FIRST_PROMPT_ROWS, MOST_PROMPT_ROWS = 32, 8192
"""Rows of steps with prompts.  Above, a device computes longer than a host launches."""
Compute: TypeAlias = Callable[[StepBatch], torch.Tensor]


def prompt_buckets(max_tokens: int) -> tuple[int, ...]:
    """Rows of captured steps with prompts: four sizes for each factor of two, and max_tokens if small.

    All but the last are multiples of 16.  Padding is at most a fifth from 128 rows on.
    """
    most = min(max_tokens, MOST_PROMPT_ROWS)
    sizes = [(4 + n % 4) << n // 4 for n in range(4 * most.bit_length())]
    return (*(size for size in sizes if FIRST_PROMPT_ROWS <= size < most and size % 16 == 0), most)


class GraphShape(NamedTuple):
    """Key of a graph.  rows: T.  prompt_sequences: S with prompts; 0 in decode steps, where S = T, a bucket.

    context: bound of a sequence's tokens.  tokens: bound of all tokens.  places: sources of deltas.
    """

    rows: int
    prompt_sequences: int
    context: int
    tokens: int
    places: tuple[Place, ...]

    @property
    def sequences(self) -> int:
        """S."""
        return self.prompt_sequences or self.rows


class _Captured(NamedTuple):
    """pieces: graphs and calls of the host, in order.  memory: of the input."""

    pieces: list[Piece]
    logits: torch.Tensor
    memory: torch.Tensor


class StepGraphs:
    """Computes steps without deltas, or with deltas from this device; decode steps also with those of
    `hosts`.

    places: of all possible deltas.  site_ranks: largest rank of these slots at each site.  hosts: by source,
    the backends that cut a captured step.

    A larger rank makes graphs with deltas invalid.  Arena and slot tables never move.  Sequences with shared
    pages may exceed the bound; such steps have separate graphs, captured at first use.  All ranks capture the
    same shapes at the same steps.  Rows of host workers stay there for the step.  The first step of an
    uncaptured shape is computed twice.
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
        prompt_rows: Sequence[int] = (),
        max_sequences: int = 0,
    ) -> None:
        self.prompt_rows = sorted(prompt_rows)
        self._max_sequences = max_sequences
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
        self._prompt_contexts = [one for one in self._contexts if one >= PROMPT_CONTEXT] or [max_tokens]
        self._ranks = site_ranks(np.array([-1]))
        self._graphs: dict[GraphShape, _Captured] = {}

    def shape_of(self, batch: StepBatch) -> GraphShape | None:
        """The graph for this step, or None."""
        routing, tables = batch.routing, batch.tables
        rows = len(batch.tokens) if tables.decode else self._prompt_rows_of(batch)
        if rows is None or (tables.decode and rows not in self._rows):
            return None
        places = self._places_of(routing)
        if places is None or self._changes_embedding(routing):
            return None
        if not tables.decode and any(source != Source.LOCAL for source, _ in places):
            return None
        longest = int(tables.seq_lens.max())
        contexts = self._contexts if tables.decode else self._prompt_contexts
        context = next((bound for bound in contexts if bound >= longest), None)
        if context is None:
            return None
        shape = self._shape(rows, context, places, decode=tables.decode)
        if int(tables.seq_lens.sum()) <= shape.tokens:
            return shape
        return shape._replace(tokens=shape.sequences * context)

    def _prompt_rows_of(self, batch: StepBatch) -> int | None:
        """The step's padded size; None for deltas of embedding, head or loading adapters."""
        if batch.routing.outer is not None or batch.routing.loading.any():
            return None
        return next((size for size in self.prompt_rows if size >= len(batch.tokens)), None)

    def _shape(
        self, rows: int, context: int, places: tuple[Place, ...], *, decode: bool = False
    ) -> GraphShape:
        """The shape for sequences without shared pages.  With prompts, padding rows have a sequence."""
        shape = GraphShape(rows, 0 if decode else min(rows, self._max_sequences) + 1, context, 0, places)
        return shape._replace(tokens=min(shape.sequences * context, self._kv_tokens))

    def _places_of(self, routing: RowRouting) -> tuple[Place, ...] | None:
        """Sources of deltas; None without a graph for them."""
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
        """True for deltas of the embedding, whose launches depend on the adapters."""
        if routing.outer is None:
            return False
        return self._site_ranks(routing.terms_from(Source.LOCAL, routing.outer)["slot"])[-1] > 0

    def run(self, shape: GraphShape, batch: StepBatch, compute: Compute) -> torch.Tensor:
        """The batch's logits, valid until the next step.  compute: launches a step."""
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
        if not batch.tables.decode:
            return graph.logits[: len(wanted)]
        if torch.equal(wanted, torch.arange(len(wanted))):
            return graph.logits[: len(wanted)]
        return graph.logits.index_select(0, wanted.pin_memory().to(graph.logits.device, non_blocking=True))

    def warm_up(
        self, empty: Callable[[int, bool], StepBatch], compute: Compute, ranks: Sequence[int]
    ) -> None:
        """Capture all shapes of decode steps, and with prompts those of the smallest context.

        empty: a batch of padding rows.  ranks: the largest at each site.
        """
        self._admit(ranks)
        kinds: list[tuple[Place, ...]] = [(), self._places] if any(self._ranks) else [()]
        shapes = [shape for places in kinds for shape in self._shapes(places)]
        shapes.sort(key=lambda shape: (shape.rows, shape.context), reverse=True)
        # The largest input first, so that the buffer stays.
        for rows in self.prompt_rows[-1:]:
            largest = self._shape(rows, self._prompt_contexts[-1], ())
            self._padded(largest, empty(rows, False)).through(self._buffer, self._bounds(largest))
        for number, shape in enumerate(shapes):
            batch = empty(shape.rows, not shape.prompt_sequences)
            if shape.places:
                batch = replace(batch, routing=with_places(batch, shape.places))
            inputs = self._padded(shape, batch).through(self._buffer, self._bounds(shape))
            self._captured(shape, inputs, compute)
            if number % 20 == 19:
                logger.info("captured %d of %d steps as graphs", number + 1, len(shapes))
        logger.info("captured %d steps as graphs", len(shapes))

    def _shapes(self, places: tuple[Place, ...]) -> list[GraphShape]:
        decode = [self._shape(r, c, places, decode=True) for r in self._rows for c in self._contexts]
        if any(source != Source.LOCAL for source, _ in places):
            return decode
        return decode + [self._shape(rows, self._prompt_contexts[0], places) for rows in self.prompt_rows]

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
            has_single=True,
            has_several=shape.prompt_sequences > 0,
            longest_single=shape.context,
            single_tokens=shape.tokens,
        )

    def _padded(self, shape: GraphShape, batch: StepBatch) -> StepBatch:
        tables = batch.tables
        blocks = torch.zeros(shape.sequences, -(-shape.context // self._block_size), dtype=torch.int32)
        known = tables.block_tables[:, : blocks.shape[1]]
        blocks[: len(known), : known.shape[1]] = known
        routing = replace(batch.routing, site_ranks=self._ranks if shape.places else None)
        if not tables.decode:
            return _padded_prompt(shape, batch, blocks, routing)
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


def _padded_prompt(
    shape: GraphShape, batch: StepBatch, block_tables: torch.Tensor, routing: RowRouting
) -> StepBatch:
    """Further rows belong to one padding sequence; later sequences have no rows."""
    tables, extra = batch.tables, shape.rows - len(batch.tokens)
    query_start = torch.full((shape.prompt_sequences + 1,), shape.rows, dtype=torch.int32)
    query_start[: len(tables.query_start)] = tables.query_start
    return replace(
        batch,
        tokens=functional.pad(batch.tokens, (0, extra)),
        positions=functional.pad(batch.positions, (0, extra)),
        live=functional.pad(batch.live, (0, extra)),
        logit_rows=functional.pad(batch.logit_rows, (0, shape.prompt_sequences - len(batch.logit_rows))),
        tables=StepTables(
            query_start=query_start,
            seq_lens=functional.pad(tables.seq_lens, (0, shape.prompt_sequences - len(tables.seq_lens))),
            block_tables=block_tables,
        ),
        routing=replace(routing, row_route=np.pad(routing.row_route, (0, extra), constant_values=-1)),
    )
