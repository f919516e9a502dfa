"""One adapter merged into the weights between steps: who decides, and how all ranks follow.

`MergedWeights` carries orders out in one rank's memory and says what a step's rows need because of them;
`Merging`, on rank 0, asks the policy before each step and has the weights follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from moe_lora.adapters.packed import PackedAdapter, shard_layer
from moe_lora.core.clock import Clock
from moe_lora.core.errors import EngineDeadError
from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.adapters.manager import AdapterManager
from moe_lora.kernels.operands import SlotTable
from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.local import LocalBackend, part_bytes, point_slot
from moe_lora.lora.row_routing import TERM, RowRouting, Source, on_merged_weights
from moe_lora.models.weight_merge import HeldAdapter, WeightMerge
from moe_lora.policies.merging import Batching, MergingPolicy, MergingView
from moe_lora.policies.merging_costs import Mode, Uid
from moe_lora.scheduling.views import Scheduled

from .sequence import Sequence

Piece = tuple[int, int]
"""(layer, site)."""


@dataclass(frozen=True)
class MergedAdapter:
    """An adapter as all ranks know it.  slot: on the device, -1 where the LoRA Server computes all of it."""

    uid: int
    slot: int
    content_hash: str


@dataclass(frozen=True)
class MergeOrder:
    """Have the weights carry these pieces of the adapter, or no longer.  last: then all is in, or none."""

    adapter: MergedAdapter
    pieces: tuple[Piece, ...]
    fold_in: bool
    last: bool


class MergedWeights:
    """One rank's weights, and what they carry.

    leased: sites whose deltas the LoRA Server computes; A and B of the merged adapter are held beside the
    arena there.  kept: [X] bool, entries of these sites that this rank has.  find: content hash -> the packed
    adapter.  verify: compare the weights' checksum with the first one each time an adapter was taken out.
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
        """All that can be merged of it is."""
        self._backend = backend
        self._arena, self._slots = arena, slots
        self._leased = leased
        self._kept = kept
        self._find = find
        self._kernel = kernel
        self._checksum = weights.checksum() if verify else None
        self._held: HeldAdapter | None = None
        shape = weights.shape
        self._local = frozenset(range(len(shape.sites))) - leased
        backend.backends[-Source.LOCAL] = LocalBackend(
            shape, arena, slots, kernel=kernel, source=-Source.LOCAL
        )

    @property
    def any_merged(self) -> bool:
        """Whether a step must know of it."""
        return self.adapter is not None and bool(self.weights.merged.any())

    def pieces(self, adapter: MergedAdapter) -> list[Piece]:
        """All that the adapter changes, in the order of a step."""
        places = self._places(adapter, self._beside_arena(adapter))
        return sorted(piece for held, sites in places for piece in self.weights.pieces(held, sites))

    def rounding_error(self, adapter: MergedAdapter) -> float:
        """See `WeightMerge.rounding_error`; of an adapter that is on the device, whatever is merged."""
        places = self._places(adapter, self._beside_arena(adapter))
        return max((self.weights.rounding_error(held, sites) for held, sites in places), default=0.0)

    def carry_out(self, order: MergeOrder) -> None:
        """In this rank's weights; raises EngineDeadError if verified weights are not what they were."""
        if order.fold_in and self.adapter is None:
            self.adapter, self._held = order.adapter, self._beside_arena(order.adapter)
            self._subtract_held()
        for piece in order.pieces:
            held = next(held for held, sites in self._places(order.adapter, self._held) if piece[1] in sites)
            if order.fold_in:
                self.weights.fold_in(piece, held)
            else:
                self.weights.take_out(piece, held)
        self.is_whole = order.fold_in and order.last
        if order.last and not order.fold_in:
            assert not self.weights.merged.any()
            self.adapter = self._held = None
            self._subtract_held()
            if self._checksum is not None and self.weights.checksum() != self._checksum:
                raise EngineDeadError(
                    f"the weights are not what they were after adapter {order.adapter.content_hash[:12]} was "
                    "taken out; restart the instance, and please report this"
                )

    def corrected(self, routing: RowRouting, sources: list[Source], route: int, num_live: int) -> RowRouting:
        """`routing` on these weights.  sources: of each of its groups.  route, num_live: see
        `on_merged_weights`."""
        assert self.adapter is not None
        subtracted = np.zeros(len(sources), TERM)
        subtracted["adapter"] = -1
        local = np.array(sources) == Source.LOCAL
        subtracted["source"] = np.where(local, -Source.LOCAL, -Source.HELD)
        subtracted["slot"] = np.where(local, self.adapter.slot, 0)
        groups = np.array(routing.groups) + len(sources) * self.weights.merged
        return on_merged_weights(routing, groups.tolist(), route, subtracted, num_live)

    def _places(
        self, adapter: MergedAdapter, held: HeldAdapter | None
    ) -> list[tuple[HeldAdapter, frozenset[int]]]:
        """Where its matrices are, and of which sites.  held: those beside the arena."""
        places = []
        if adapter.slot >= 0:
            places.append((HeldAdapter(self._arena, self._slots, adapter.slot), self._local))
        if held is not None:
            places.append((held, self._leased))
        return places

    def _beside_arena(self, adapter: MergedAdapter) -> HeldAdapter | None:
        """A and B of the sites of the LoRA Server, if there is one, copied to this device."""
        if not self._leased:
            return None
        shape, packed = self.weights.shape, self._find(adapter.content_hash)
        parts = [shard_layer(layer, shape, self._kept) for layer in packed.layers]
        data = [part_bytes(layer, part) for layer, part in zip(packed.layers, parts, strict=True)]
        offsets = np.cumsum([0, *map(len, data)]).tolist()
        arena = torch.cat(data).to(self._arena.device)
        slots = SlotTable(1, shape.num_layers, shape.num_entries, arena.device)
        point_slot(slots, 0, packed, offsets[:-1], parts)
        return HeldAdapter(arena, slots, 0)

    def _subtract_held(self) -> None:
        """Terms of source HELD are what is held now."""
        if self._held is None:
            self._backend.backends.pop(-Source.HELD, None)
            return
        self._backend.backends[-Source.HELD] = LocalBackend(
            self.weights.shape, self._held.arena, self._held.slots, kernel=self._kernel, source=-Source.HELD
        )


logger = logging.getLogger(__name__)


class Merges(Protocol):
    """What has orders carried out on all ranks (`ModelRunner`)."""

    merged: MergedWeights | None

    def swap(self, order: MergeOrder) -> None: ...


class Merging:
    """Asks the policy before each step which adapter the weights are to carry and who computes, and has them
    follow: whole at once, or at most step_bytes of weights a step (and at least one site of one layer).

    max_error: rounding error above which an adapter is not merged (enforced), or the log says so.
    """

    def __init__(
        self,
        policy: MergingPolicy,
        runner: Merges,
        adapters: AdapterManager,
        clock: Clock,
        *,
        max_num_seqs: int,
        step_bytes: float,
        max_error: float,
        enforced: bool,
    ) -> None:
        assert runner.merged is not None
        self._counters = dict.fromkeys(("steps_merged", "steps_mixed", "merges", "unmerges"), 0)
        self._seconds = {"merge_s": 0.0, "unmerge_s": 0.0}
        self._weights = runner.merged
        self._policy = policy
        self._runner = runner
        self._adapters = adapters
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._step_bytes = step_bytes
        self._max_error = max_error
        self._enforced = enforced
        adapters.on_drop = policy.forget
        self._errors: dict[str, float] = {}
        self._carried: AdapterVersion | None = None
        """Held, its pieces partly or wholly in the weights."""
        self._pieces: list[Piece] = []
        self._num_in = 0
        self._batching = Batching()
        self._swap_s = 0.0
        self._start_s = 0.0

    @property
    def _is_whole(self) -> bool:
        return self._carried is not None and self._num_in == len(self._pieces)

    def decide(self, requests: list[Sequence], *, held_back: bool) -> frozenset[Uid] | None:
        """Ask the policy what the next step is to be, and have the weights follow; whose requests compute in
        it, None: everybody's.

        requests: in FCFS order.  held_back: some wait for an adapter's place.  An adapter without a request
        then leaves the weights, since it keeps its own for as long as it is in them.
        """
        self._start_s, self._swap_s = self._clock.now_s(), 0.0
        view = MergingView(
            requests=requests,
            max_num_seqs=self._max_num_seqs,
            merged=self._carried.uid if self._carried is not None and self._is_whole else None,
            eligible=self._is_eligible,
            now_s=self._start_s,
            swapping=self._carried is not None and not self._is_whole,
        )
        self._batching = self._policy.decide(view)
        merge = self._batching.merge
        if merge is not None and (
            not self._is_eligible(merge)
            or (held_back and all(request.adapter_uid != merge for request in requests))
        ):
            self._batching = replace(self._batching, merge=None)
        self._move(self._adapters.versions.get(self._batching.merge), at_once=self._batching.at_once)
        return self._batching.only

    def tend(self) -> None:
        """Without requests: an adapter that was unloaded leaves the weights."""
        if self._carried is not None and self._carried.retired and not self._carried.num_running:
            self._move(None, at_once=True)

    def took(self, plan: Iterable[Scheduled[Sequence]]) -> None:
        """The step is computed: count it, tell the policy, and keep what others computed on these weights out
        of the prefix cache."""
        items = list(plan)
        mode: Mode = "unmerged"
        if self._carried is not None and self._num_in:
            others = [item.sequence for item in items if item.sequence.adapter is not self._carried]
            for sequence in others:
                sequence.unshared = True
            mode = "mixed" if others or not self._is_whole else "merged"
        if mode != "unmerged":
            self._counters[f"steps_{mode}"] += 1
        num_rows = sum(item.num_tokens for item in items)
        seconds = self._clock.now_s() - self._start_s
        self._policy.took(self._batching, mode, num_rows, seconds, self._swap_s)

    def figures(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        kept = self._weights.weights.kept_bytes()
        return {**self._counters, **self._seconds, "merge_kept_bytes": kept}

    def _is_eligible(self, uid: Uid) -> bool:
        """Whether the adapter is on the device, stays, and is one that merging leaves what it is."""
        adapter = self._adapters.versions.get(uid)
        if adapter is None or adapter.retired or not self._adapters.is_ready(adapter):
            return False
        return not self._enforced or self._error(adapter) <= self._max_error

    def _error(self, adapter: AdapterVersion) -> float:
        content_hash = adapter.packed.content_hash
        if content_hash not in self._errors:
            error = self._errors[content_hash] = self._weights.rounding_error(_known(adapter))
            problem = "it stays unmerged" if self._enforced else "only batching=auto would keep it unmerged"
            logger.log(
                logging.WARNING if error > self._max_error else logging.INFO,
                "adapter %s: merging changes its deltas by %.2g of them%s",
                *(adapter.name, error, f"; {problem}" if error > self._max_error else ""),
            )
        return self._errors[content_hash]

    def _move(self, target: AdapterVersion | None, *, at_once: bool) -> None:
        start_s = self._clock.now_s()
        budget = float("inf") if at_once else self._step_bytes
        while budget > 0:
            if self._carried is not None and self._carried is not target:
                budget -= self._take_out(budget)
            elif self._carried is None and target is not None:
                if not self._begin(target):
                    break
            elif not self._is_whole and target is not None:
                budget -= self._fold_in(budget)
            else:
                break
        self._swap_s += self._clock.now_s() - start_s

    def _begin(self, adapter: AdapterVersion) -> bool:
        """Hold the adapter; False if it has nothing that can be merged, or is not there any more."""
        self._error(adapter)
        self._pieces = self._weights.pieces(_known(adapter))
        if not self._pieces or not self._adapters.hold_merged(adapter):
            return False
        self._carried, self._num_in = adapter, 0
        return True

    def _fold_in(self, budget: float) -> float:
        """The next pieces that fit the budget; their bytes."""
        assert self._carried is not None
        start_s = self._clock.now_s()
        pieces, num_bytes = self._some(self._pieces[self._num_in :], budget)
        self._num_in += len(pieces)
        self._runner.swap(MergeOrder(_known(self._carried), pieces, True, self._is_whole))
        self._seconds["merge_s"] += self._clock.now_s() - start_s
        self._counters["merges"] += self._is_whole
        return num_bytes

    def _take_out(self, budget: float) -> float:
        assert self._carried is not None
        start_s = self._clock.now_s()
        pieces, num_bytes = self._some(self._pieces[: self._num_in][::-1], budget)
        self._num_in -= len(pieces)
        self._runner.swap(MergeOrder(_known(self._carried), pieces, False, not self._num_in))
        self._seconds["unmerge_s"] += self._clock.now_s() - start_s
        if not self._num_in:
            self._counters["unmerges"] += 1
            adapter, self._carried = self._carried, None
            self._adapters.release_merged(adapter)
        return num_bytes

    def _some(self, pieces: list[Piece], budget: float) -> tuple[tuple[Piece, ...], float]:
        """The first ones within the budget, at least one."""
        some: list[Piece] = []
        num_bytes = 0
        for piece in pieces:
            size = self._weights.weights.num_bytes(piece)
            if some and num_bytes + size > budget:
                break
            some.append(piece)
            num_bytes += size
        return tuple(some), max(1, num_bytes)


def _known(adapter: AdapterVersion) -> MergedAdapter:
    slot = -1 if adapter.slot is None else adapter.slot
    return MergedAdapter(adapter.uid, slot, adapter.packed.content_hash)
