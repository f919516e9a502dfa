# SPDX-License-Identifier: Apache-2.0
"""Where each row's LoRA deltas are computed in a step: one table for all backends.

Legend: T token rows, L layers, N routes, G groups of sites, M terms.

Rows of one adapter share a route, so the table has a row per adapter of the step, not per token: a token row
costs one index.
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
    """Who computes a term."""

    LOCAL = 1
    LEASED = 2
    HOST = 3
    HELD = 4
    """This device, from memory beside the arena: the merged adapter at sites of the LoRA Server."""
    PUSHED = 5
    """The LoRA Server, asked by puts of this device: what is LEASED, in steps that can be."""


TERM = np.dtype(
    [("source", np.int8), ("adapter", np.int16), ("slot", np.int32), ("generation", np.int64)], align=True
)
"""One signed delta of a row.

source: a `Source`, negated where the delta is subtracted; 0 = no term.  adapter: index into
`RowRouting.adapters`, -1 where a slot is enough.  slot: of this device's slot table (LOCAL, and HOST, where
the adapter is on its way to it; -1 = nothing of the adapter is there), or of the LoRA Server's (LEASED and
PUSHED; -1 = there is no lease).  generation: of the lease; of a HOST term the number of the adapter's
content.
"""
NO_TERM = np.array((0, -1, -1, 0), TERM)


@dataclass(frozen=True)
class Lease:
    """Where the LoRA Server serves an adapter; the generation tells one content of the slot from the next."""

    slot: int
    generation: int


class RoutedAdapter(NamedTuple):
    """An adapter as backends without slots know it.  targets: modules that it has deltas for."""

    content_hash: str
    targets: tuple[str, ...]


_NUMBER_DIGITS = 15


def content_number(content_hash: str) -> int:
    """What a HOST term says of an adapter: the first 60 bits of its content's hash."""
    return int(content_hash[:_NUMBER_DIGITS], 16)


def content_prefix(number: int) -> str:
    """How the hash of such a number begins."""
    return f"{number:0{_NUMBER_DIGITS}x}"


def no_terms(num_routes: int, num_groups: int, num_terms: int = 1) -> np.ndarray:
    """[num_routes + 1, num_groups, num_terms] TERM without any term; the last route stays so."""
    terms = np.zeros((num_routes + 1, num_groups, num_terms), TERM)
    terms["slot"] = terms["adapter"] = -1
    return terms


@dataclass(frozen=True, kw_only=True)
class RowRouting:
    """Of each row and group of sites up to M signed terms; their sum is added to the sites' output.

    groups: [L][sites] group of each site of each layer.  row_route: [T] int32 route of each row, -1 = base
    model.  terms: [N + 1, G, M] TERM; the last route has none.  M is 1 as long as nothing is merged.  Where
    weights carry an adapter, M is 2: its own rows have no term, all others subtract it, those of the base
    model by a route of their own.  adapters: may be empty where all sources are LOCAL.  here: [N, L] bool,
    layers in which a route's HOST terms are computed on the device all the same, so that all ranks of an
    instance choose alike; None: where they are there when they begin.  on_device: `slots_here` and
    `frames_pushed` in the memory of the device that computes the step, as far as they were copied there with
    the rest of its input.
    site_ranks: largest rank at each site that this device's launches are made for; None: that of the rows.
    """

    groups: Sequence[Sequence[int]]
    row_route: np.ndarray
    terms: np.ndarray
    adapters: Sequence[RoutedAdapter] = ()
    here: np.ndarray | None = None
    on_device: Mapping[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    site_ranks: Sequence[int] | None = None

    @property
    def has_deltas(self) -> bool:
        """Some row has a term."""
        return any(self.sources)

    @cached_property
    def sources(self) -> list[set[int]]:
        """Of each group, the `Source`s of its terms in this step, negated where they are subtracted."""
        codes = self.terms["source"]
        return [set(codes[:, group].ravel().tolist()) - {0} for group in range(codes.shape[1])]

    @property
    def loading(self) -> np.ndarray:
        """[N + 1, G] bool, terms that host workers compute as long as the adapter is not on the device."""
        return self.terms["source"][:, :, 0] == Source.HOST

    @property
    def loading_slots(self) -> dict[int, int]:
        """By route with such terms the slot that the adapter is on its way to; none where it has none."""
        loading = self.loading[:-1]
        slots = np.where(loading, self.terms["slot"][:-1, :, 0], -1).max(1, initial=-1)
        return {route: int(slots[route]) for route in np.flatnonzero(slots >= 0).tolist()}

    def taken_over(self, routes: Sequence[int]) -> RowRouting:
        """The same, with what hosts were to compute of these routes computed on this device."""
        terms = self.terms.copy()
        source = terms["source"]
        source[routes] = np.where(source[routes] == Source.HOST, Source.LOCAL, source[routes])
        return replace(self, terms=terms, on_device={})

    def slots_here(self) -> dict[tuple[int, int], np.ndarray]:
        """[T] int32, by source and group: the slot of each row whose term this device computes, else -1."""
        return {
            place: np.ascontiguousarray(self.terms_from(*place)["slot"])
            for place in self._places()
            if abs(place[0]) in (Source.LOCAL, Source.HELD)
        }

    def frames_pushed(self) -> dict[tuple[int, int], np.ndarray]:
        """[1 + 2 T] int64, by source and group, of PUSHED terms: T, the slot of each row or -1, the
        generations."""
        found = {}
        for place in self._places():
            if place[0] == Source.PUSHED:
                terms = self.terms_from(*place)
                found[place] = np.concatenate([[len(terms)], terms["slot"], terms["generation"]])
        return found

    def _places(self) -> list[tuple[int, int]]:
        return [(source, group) for group, sources in enumerate(self.sources) for source in sources]

    def pushed(self) -> RowRouting:
        """The same, with what is LEASED asked by puts of this device."""
        terms = self.terms.copy()
        terms["source"][terms["source"] == Source.LEASED] = Source.PUSHED
        return replace(self, terms=terms, on_device={})

    def terms_from(self, source: int, group: int) -> np.ndarray:
        """[T] TERM: of each row the term that this source computes; slot -1, adapter -1 where it has none.

        source: negated for terms that are subtracted, which are second ones.
        """
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
    """The same step on weights that carry an adapter at some sites: there its own rows have no term, and all
    others subtract it.

    groups: [L][sites], group g of `routing` where the site is as it was, g + G where it carries the adapter.
    route: that of the adapter's rows, -1 if it has none in this step.  subtracted: [G] TERM, what the others
    subtract.  num_live: rows from there on are padding.
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
    """All deltas from this device.  token_slots: [T] int32 slot of each row, -1 = base model."""
    terms = no_terms(int(token_slots.max(initial=-1)) + 1, 1)
    terms["source"][:-1] = Source.LOCAL
    terms["slot"][:-1, 0, 0] = range(len(terms) - 1)
    return RowRouting(
        groups=((0,) * len(shape.sites),) * shape.num_layers, row_route=token_slots, terms=terms
    )
