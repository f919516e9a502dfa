# SPDX-License-Identifier: Apache-2.0
"""Routing of a step's rows to sources of LoRA deltas.  Rows of one adapter share a route.

Legend: T token rows, L layers, N routes, G groups of sites, M terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moe_lora.core.shape import ModelShape

if TYPE_CHECKING:
    import torch


class Source(IntEnum):
    """Computes a term."""

    LOCAL = 1
    LEASED = 2
    HOST = 3
    HELD = 4
    """This device, outside the arena: the merged adapter at a LoRA Server's sites."""
    PUSHED = 5
    """The LoRA Server by device puts, in eligible steps."""


TERM = np.dtype(
    [("source", np.int8), ("adapter", np.int16), ("slot", np.int32), ("generation", np.int64)], align=True
)
"""One signed delta of a row.

source: a `Source`, negated for a subtraction; 0 = no term.  adapter: index into `RowRouting.adapters`, -1 if
a slot suffices.  slot: of this device's table (LOCAL, HOST) or the LoRA Server's (LEASED, PUSHED); -1 = none.
generation: of the lease; of a HOST term the content number.
"""
NO_TERM = np.array((0, -1, -1, 0), TERM)


@dataclass(frozen=True)
class Lease:
    """A slot on the LoRA Server; the generation identifies the content."""

    slot: int
    generation: int


class RoutedAdapter(NamedTuple):
    """An adapter for backends without slots.  targets: modules with deltas."""

    content_hash: str
    targets: tuple[str, ...]


_NUMBER_DIGITS = 15


def content_number(content_hash: str) -> int:
    """The adapter of a HOST term: first 60 bits of the content hash."""
    return int(content_hash[:_NUMBER_DIGITS], 16)


def content_prefix(number: int) -> str:
    return f"{number:0{_NUMBER_DIGITS}x}"


def no_terms(num_routes: int, num_groups: int, num_terms: int = 1) -> np.ndarray:
    """[num_routes + 1, num_groups, num_terms] TERM, empty."""
    terms = np.zeros((num_routes + 1, num_groups, num_terms), TERM)
    terms["slot"] = terms["adapter"] = -1
    return terms


@dataclass(frozen=True, kw_only=True)
class RowRouting:
    """Up to M signed terms per row and group of sites, summed into the sites' output.

    groups: [L][sites], the group of each site.  row_route: [T] int32, -1 = base model.  terms: [N + 1, G, M]
    TERM; the last route is empty.  M is 1 without merging, else 2: the merged adapter's rows have no term,
    other rows subtract the adapter.  adapters: may be empty if all sources are LOCAL.  here: [N, L] bool,
    layers with HOST terms computed on the device; None: layers present at `begin`.  on_device: `slots_here`
    and `frames_pushed` there.  site_ranks: largest rank per site for launches; None: of the rows.  outer:
    group of the sites outside the layers; columns: of rows with scaled or shifted columns; None: no such row.
    """

    groups: Sequence[Sequence[int]]
    row_route: np.ndarray
    terms: np.ndarray
    adapters: Sequence[RoutedAdapter] = ()
    here: np.ndarray | None = None
    on_device: Mapping[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    site_ranks: Sequence[int] | None = None
    outer: int | None = None
    columns: int | None = None

    @property
    def has_deltas(self) -> bool:
        """Some row has a term."""
        return any(self.sources)

    @cached_property
    def sources(self) -> list[set[int]]:
        """`Source`s of each group's terms, negated for subtractions."""
        codes = self.terms["source"]
        return [set(codes[:, group].ravel().tolist()) - {0} for group in range(codes.shape[1])]

    @property
    def loading(self) -> np.ndarray:
        """[N + 1, G] bool, terms of loading adapters."""
        return self.terms["source"][:, :, 0] == Source.HOST

    @property
    def loading_slots(self) -> dict[int, int]:
        """The loading adapter's slot, by route."""
        loading = self.loading[:-1]
        slots = np.where(loading, self.terms["slot"][:-1, :, 0], -1).max(1, initial=-1)
        return {route: int(slots[route]) for route in np.flatnonzero(slots >= 0).tolist()}

    def taken_over(self, routes: Sequence[int]) -> RowRouting:
        """The routing with these routes' HOST terms computed here."""
        terms = self.terms.copy()
        source = terms["source"]
        source[routes] = np.where(source[routes] == Source.HOST, Source.LOCAL, source[routes])
        return replace(self, terms=terms, on_device={})

    def slots_here(self) -> dict[tuple[int, int], np.ndarray]:
        """[T] int32, by source and group: slots on this device or -1."""
        return {
            place: np.ascontiguousarray(self.terms_from(*place)["slot"])
            for place in self._places()
            if abs(place[0]) in (Source.LOCAL, Source.HELD)
        }

    def frames_pushed(self) -> dict[tuple[int, int], np.ndarray]:
        """[1 + 2 T] int64, by source and group: T, slots or -1, generations."""
        found = {}
        for place in self._places():
            if place[0] == Source.PUSHED:
                terms = self.terms_from(*place)
                found[place] = np.concatenate([[len(terms)], terms["slot"], terms["generation"]])
        return found

    def _places(self) -> list[tuple[int, int]]:
        return [(source, group) for group, sources in enumerate(self.sources) for source in sources]

    def pushed(self) -> RowRouting:
        """The routing with LEASED terms as PUSHED."""
        terms = self.terms.copy()
        terms["source"][terms["source"] == Source.LEASED] = Source.PUSHED
        return replace(self, terms=terms, on_device={})

    def terms_from(self, source: int, group: int) -> np.ndarray:
        """[T] TERM: each row's term of this source, or NO_TERM."""
        terms = self.terms[:, group, 0 if source > 0 else 1]
        if self.sources[group] != {source}:
            terms = np.where(terms["source"] == source, terms, NO_TERM)
        return terms[self.row_route]


def on_merged_weights(
    routing: RowRouting,
    groups: Sequence[Sequence[int]],
    route: int,
    subtracted: np.ndarray,
    num_live: int,
) -> RowRouting:
    """The routing on weights with a merged adapter: its rows have no term, other rows subtract the adapter.

    groups: [L][sites], group g if unmerged, g + G if merged.  route: of the adapter's rows, -1 without rows.
    subtracted: [G] TERM.  num_live: padding rows start here.
    """
    (num_routes, num_groups), of_base = routing.terms.shape[:2], routing.row_route[:num_live] < 0
    num_routes += int(of_base.any()) - 1
    terms = no_terms(num_routes, 2 * num_groups, 2)
    own = len(routing.terms) - 1
    terms[:own, :num_groups, 0] = terms[:own, num_groups:, 0] = routing.terms[:-1, :, 0]
    terms[:-1, num_groups:, 1] = subtracted
    if route >= 0:
        terms[route, num_groups:] = NO_TERM
    row_route = routing.row_route.copy()
    row_route[:num_live][of_base] = own
    return replace(routing, groups=groups, row_route=row_route, terms=terms)


def local_routing(shape: ModelShape, token_slots: np.ndarray) -> RowRouting:
    """All deltas from this device.  token_slots: [T] int32, -1 = base model."""
    terms = no_terms(int(token_slots.max(initial=-1)) + 1, 1)
    terms["source"][:-1] = Source.LOCAL
    terms["slot"][:-1, 0, 0] = range(len(terms) - 1)
    return RowRouting(
        groups=((0,) * len(shape.sites),) * shape.num_layers, row_route=token_slots, terms=terms
    )
