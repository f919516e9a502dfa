# SPDX-License-Identifier: Apache-2.0
"""Merged state of one rank's weights, and the routing of rows there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from moe_lora.adapters.packed import PackedAdapter, shard_layer
from moe_lora.core.errors import EngineDeadError
from moe_lora.kernels.operands import SlotTable
from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.local import LocalBackend, part_bytes, point_slot
from moe_lora.lora.row_routing import NO_TERM, TERM, RowRouting, Source, on_merged_weights
from moe_lora.models.weight_merge import NEVER_MERGED, HeldAdapter, WeightMerge

Piece = tuple[int, int]
"""(layer, site)."""


@dataclass(frozen=True)
class MergedAdapter:
    """slot: -1 if the LoRA Server computes the whole adapter."""

    uid: int
    slot: int
    content_hash: str


@dataclass(frozen=True)
class MergeOrder:
    """Merge or unmerge these pieces; without pieces: restore all original weights.

    last: afterwards the adapter is fully merged or unmerged.
    """

    adapter: MergedAdapter
    pieces: tuple[Piece, ...]
    fold_in: bool
    last: bool


class MergedWeights:
    """One rank's weights and their merge state.

    leased: sites of the LoRA Server, with A and B beside the arena.  kept: [X] bool, entries of these sites
    here.  verify: compare the weights' checksum after each unmerge.
    """

    def __init__(
        self,
        weights: WeightMerge,
        backend: RoutedBackend,
        arena: torch.Tensor,
        slots: SlotTable,
        *,
        leased: frozenset[int],
        kept: np.ndarray,
        find: Callable[[str], PackedAdapter],
        kernel: str,
        verify: bool,
    ) -> None:
        self.weights = weights
        self.adapter: MergedAdapter | None = None
        self.is_whole = False
        """All mergeable pieces are merged."""
        self.needs_no_server = False
        """The LoRA Server has no other part to compute."""
        self._backend = backend
        self._arena, self._slots = arena, slots
        self._leased = leased
        self._kept = kept
        self._find = find
        self._kernel = kernel
        self._checksum = weights.checksum() if verify else None
        self._held: HeldAdapter | None = None
        self._copied: tuple[str, HeldAdapter] | None = None
        """The last adapter copied, by content hash."""
        shape = weights.shape
        self._local = frozenset(range(len(shape.sites))) - leased
        backend.backends[-Source.LOCAL] = LocalBackend(
            shape, arena, slots, kernel=kernel, source=-Source.LOCAL
        )

    @property
    def any_merged(self) -> bool:
        """True if steps need `corrected`."""
        return self.adapter is not None and bool(self.weights.merged.any())

    def pieces(self, adapter: MergedAdapter) -> list[Piece]:
        """All pieces of the adapter, in a step's order."""
        places = self._places(adapter)
        return sorted(piece for held, sites in places for piece in self.weights.pieces(held, sites))

    def rounding(self, adapter: MergedAdapter, piece: Piece) -> Iterator[tuple[int, float, float]]:
        """See `WeightMerge.rounding`; for an adapter on the device."""
        return self.weights.rounding(piece, self._place_of(piece, self._places(adapter)))

    def carry_out(self, order: MergeOrder) -> None:
        """Change this rank's weights; raises EngineDeadError if verified weights differ."""
        if not order.pieces:
            self.weights.restore()
            self._end_carrying(order.adapter)
            return
        if order.fold_in and self.adapter is None:
            self.adapter, self._held = order.adapter, self._beside_arena(order.adapter)
            self._subtract_held()
        places = self._places(order.adapter)
        change = self.weights.fold_in if order.fold_in else self.weights.take_out
        for piece in order.pieces:
            change(piece, self._place_of(piece, places))
        self.is_whole = order.fold_in and order.last
        self.needs_no_server = self.is_whole and not self._keeps_to_server(order.adapter)
        if order.last and not order.fold_in:
            assert not self.weights.merged.any()
            self._end_carrying(order.adapter)

    def _end_carrying(self, adapter: MergedAdapter) -> None:
        self.is_whole = self.needs_no_server = False
        self.adapter = self._held = None
        self._subtract_held()
        if self._checksum is not None and self.weights.checksum() != self._checksum:
            raise EngineDeadError(
                f"the weights are not what they were after adapter {adapter.content_hash[:12]} was "
                "taken out; restart the instance, and please report this"
            )

    def corrected(self, routing: RowRouting, sources: list[Source], route: int, num_live: int) -> RowRouting:
        """`routing` on these weights.  sources: by group.  route, num_live: see `on_merged_weights`."""
        assert self.adapter is not None
        subtracted = np.zeros(len(sources), TERM)
        subtracted["adapter"] = -1
        local = np.array(sources) == Source.LOCAL
        subtracted["source"] = np.where(local, -Source.LOCAL, -Source.HELD)
        subtracted["slot"] = np.where(local, self.adapter.slot, 0)
        groups = np.array(routing.groups) + len(sources) * self.weights.merged
        corrected = on_merged_weights(routing, groups.tolist(), route, subtracted, num_live)
        if self.needs_no_server and route >= 0:  # else sites without the adapter would call the server
            of_route = corrected.terms[route]
            of_route[of_route["source"] == Source.LEASED] = NO_TERM
        return corrected

    def _keeps_to_server(self, adapter: MergedAdapter) -> bool:
        sites = [self.weights.shape.sites[number] for number in self._leased]
        modules = {module for site in sites if site.name in NEVER_MERGED for module in site.modules}
        return bool(modules) and not modules.isdisjoint(self._find(adapter.content_hash).targets)

    def _places(self, adapter: MergedAdapter) -> list[tuple[HeldAdapter, frozenset[int]]]:
        places = []
        if adapter.slot >= 0:
            places.append((HeldAdapter(self._arena, self._slots, adapter.slot), self._local))
        if (held := self._beside_arena(adapter)) is not None:
            places.append((held, self._leased))
        return places

    def _place_of(self, piece: Piece, places: list[tuple[HeldAdapter, frozenset[int]]]) -> HeldAdapter:
        return next(held for held, sites in places if piece[1] in sites)

    def _beside_arena(self, adapter: MergedAdapter) -> HeldAdapter | None:
        """A and B of the LoRA Server's sites, copied to this device, if any.

        Keeps the merged adapter and a candidate.
        """
        if not self._leased:
            return None
        if self._held is not None and self.adapter == adapter:
            return self._held
        if self._copied is None or self._copied[0] != adapter.content_hash:
            self._copied = None
            self._copied = adapter.content_hash, self._copy(adapter)
        return self._copied[1]

    def _copy(self, adapter: MergedAdapter) -> HeldAdapter:
        shape, packed = self.weights.shape, self._find(adapter.content_hash)
        shard = self.weights.shard if self.weights.shard.tensor_parallel > 1 else None
        parts = [shard_layer(layer, self.weights.shard.whole, self._kept, shard) for layer in packed.layers]
        data = [part_bytes(layer, part) for layer, part in zip(packed.layers, parts, strict=True)]
        offsets = np.cumsum([0, *map(len, data)]).tolist()
        arena = torch.cat(data).to(self._arena.device)
        slots = SlotTable(1, shape.num_layers, shape.num_entries, arena.device)
        point_slot(slots, 0, packed, offsets[:-1], parts)
        return HeldAdapter(arena, slots, 0)

    def _subtract_held(self) -> None:
        if self._held is None:
            self._backend.backends.pop(-Source.HELD, None)
            return
        self._backend.backends[-Source.HELD] = LocalBackend(
            self.weights.shape, self._held.arena, self._held.slots, kernel=self._kernel, source=-Source.HELD
        )


ROUNDED_PIECES = 2
"""Pieces measured between two steps."""


class RoundingErrors:
    """Rounding errors of merged adapters, measured in parts before each step."""

    def __init__(self, weights: MergedWeights) -> None:
        self._weights = weights
        self._known: dict[str, float] = {}
        self._under_way: dict[str, tuple[list[Piece], dict[tuple[int, int], np.ndarray]]] = {}
        """Remaining pieces, and squares by site and module."""
        self._num_left = 0

    def begin_step(self) -> None:
        self._num_left = ROUNDED_PIECES

    def forget(self, content_hash: str) -> None:
        """Drop the measurement of an unloaded adapter, or a failed one."""
        self._known.pop(content_hash, None)
        self._under_way.pop(content_hash, None)

    def of(self, adapter: MergedAdapter) -> float | None:
        """|W_a - W - delta| / |delta|, the largest over modules; None: not measured yet.

        0 without mergeable deltas.
        """
        content_hash = adapter.content_hash
        if content_hash in self._known or not self._num_left:
            return self._known.get(content_hash)
        if content_hash not in self._under_way:
            self._under_way[content_hash] = self._weights.pieces(adapter), {}
        pieces, squares = self._under_way[content_hash]
        while pieces and self._num_left:
            self._num_left -= 1
            piece = pieces.pop()
            for module, lost, delta in self._weights.rounding(adapter, piece):
                key = piece[1], module
                squares[key] = squares.get(key, 0.0) + np.array([lost, delta])
        if pieces:
            return None
        del self._under_way[content_hash]
        errors = (math.sqrt(lost / delta) for lost, delta in squares.values() if delta)
        self._known[content_hash] = max(errors, default=0.0)
        return self._known[content_hash]
