# SPDX-License-Identifier: Apache-2.0
"""Resident adapters of the LoRA Server: slots and pages."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from moe_lora.cache.pages import PageAllocator
from moe_lora.config import MAX_COUNT
from moe_lora.core.errors import ConfigError
from moe_lora.policies.admission.admission import by_recency
from moe_lora.policies.caching.caching import NOBODY

from .lease_queue import Standing

Run: TypeAlias = tuple[int, int]
"""(first page, number of pages)"""
Runs: TypeAlias = Mapping[int, Mapping[int, Run]]
"""server rank -> layer -> run, without empty ranks and layers."""
ShardPages: TypeAlias = Mapping[int, Mapping[int, int]]
"""server rank -> layer -> pages"""


class ServerPages:
    """A page allocator per server rank."""

    def __init__(self, pages_per_rank: Sequence[int]) -> None:
        self.pages_per_rank = tuple(pages_per_rank)
        self._ranks = [PageAllocator(num_pages) for num_pages in pages_per_rank]

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free pages of each rank."""
        return tuple(pages.num_free for pages in self._ranks)

    def alloc(self, shard_pages: ShardPages) -> Runs | None:
        """A run per rank and layer; None, without effect, if a run has no place."""
        for rank, layers in shard_pages.items():
            if sum(layers.values()) > self._ranks[rank].num_free:
                return None
        runs: dict[int, dict[int, Run]] = {rank: {} for rank in shard_pages}
        for rank, layers in shard_pages.items():
            for layer, num_pages in layers.items():
                first = self._ranks[rank].alloc_run(num_pages)
                if first is None:
                    self.free(runs)
                    return None
                runs[rank][layer] = (first, num_pages)
        return runs

    def free(self, runs: Runs) -> None:
        for rank, layers in runs.items():
            for first, num_pages in layers.values():
                self._ranks[rank].free(first, num_pages)

    def could_alloc(self, shard_pages: ShardPages, pinned: Sequence[Runs]) -> bool:
        """True if `alloc` would succeed beside the `pinned` runs."""
        return all(
            fits(
                self.pages_per_rank[rank],
                [run for runs in pinned for run in runs.get(rank, {}).values()],
                layers.values(),
            )
            for rank, layers in shard_pages.items()
        )

    def check_fits(self, adapter_id: str, shard_pages: ShardPages, page_bytes: int) -> None:
        """Raise ConfigError if a rank can never hold its shard."""
        shards = sorted(((sum(layers.values()), rank) for rank, layers in shard_pages.items()), reverse=True)
        for needed, rank in shards:
            given = self.pages_per_rank[rank]
            if needed > given:
                raise ConfigError(
                    f"content {adapter_id} takes {needed * page_bytes / 1e9:.6f} GB on rank {rank} of the "
                    f"LoRA Server, whose budget for all adapters is {given * page_bytes / 1e9:.6f} GB; raise "
                    "lora_server.memory_gb (--lora-server-memory-gb) to "
                    f"{enough_gb(needed * page_bytes):.6f} or more"
                )

    def num_fitting(self, known: Sequence[ShardPages]) -> int:
        """Adapters of mean size that fit on every rank, ignoring fragmentation."""
        return min(
            _num_fitting(num_pages, [sum(shards.get(rank, {}).values()) for shards in known])
            for rank, num_pages in enumerate(self.pages_per_rank)
        )


def fits(num_pages: int, taken: Iterable[Run], wanted: Iterable[int]) -> bool:
    """True if the wanted runs fit beside the taken, first fit."""
    gaps = []
    end = 0
    for first, length in sorted(taken):
        gaps.append(first - end)
        end = first + length
    gaps.append(num_pages - end)
    for length in wanted:
        place = next((index for index, gap in enumerate(gaps) if gap >= length), None)
        if place is None:
            return False
        gaps[place] -= length
    return True


def _num_fitting(num_pages: int, sizes: Sequence[int]) -> int:
    return max(1, num_pages * len(sizes) // sum(sizes)) if any(sizes) else MAX_COUNT


def enough_gb(num_bytes: int) -> float:
    """Budget for the bytes; larger pages cost less than 0.1 %."""
    return math.ceil(num_bytes * 1.001 / 1e3) / 1e6


@dataclass(frozen=True)
class Load:
    """Load the shards, layer by layer, and serve (slot, generation)."""

    adapter_id: str
    slot: int
    generation: int
    runs: Runs


@dataclass(frozen=True)
class Evict:
    """Stop serving (slot, generation): the pages belong to later loads."""

    adapter_id: str
    slot: int
    generation: int


@dataclass(eq=False)
class ServedAdapter:
    """A registered adapter."""

    uid: int
    adapter_id: str
    shard_pages: ShardPages
    room: tuple[int, ...]
    """Places, and pages of each rank."""
    owner: int = NOBODY
    """Of the last lease."""
    slot: int | None = None
    generation: int = 0
    runs: Runs = field(default_factory=dict)
    num_running: int = 0
    """Instances with a lease."""
    num_waiting: int = 0
    last_used_s: float = -math.inf
    retired: bool = False
    """Unregistered, but in use."""

    @property
    def num_pages(self) -> int:
        """Pages over all ranks and layers."""
        return sum(self.room[1:])


class Residency:
    """Assigns slots and pages, evicting the least recently used idle adapters.

    With several tenants a `Standing` orders evictions.  A generation grows with new content.
    """

    def __init__(self, pages_per_rank: Sequence[int], on_event: Callable[[Load | Evict], None]) -> None:
        self.capacity = 0
        self.pages = ServerPages(pages_per_rank)
        self.adapters: dict[int, ServedAdapter] = {}
        self.num_loads = self.num_evictions = self.num_pages_loaded = 0
        self._on_event = on_event
        self._generations: list[int] = []
        self._free_slots: list[int] = []
        self._used = [0] * (1 + len(pages_per_rank))
        """Places, and pages of ranks, of leased adapters."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Places, and pages of each rank."""
        return self.capacity, *self.pages.pages_per_rank

    @property
    def is_over(self) -> bool:
        """True above a lowered capacity."""
        return len(self.adapters) > self.capacity

    def room(self, shard_pages: Mapping[int, Mapping[int, int]]) -> tuple[int, ...]:
        """An adapter's share of `totals`."""
        ranks = range(len(self.pages.pages_per_rank))
        return 1, *(sum(shard_pages.get(rank, {}).values()) for rank in ranks)

    def resize(self, capacity: int) -> None:
        """Slot numbers stay below the largest capacity so far."""
        for slot in range(len(self._generations), capacity):
            self._generations.append(0)
            heapq.heappush(self._free_slots, slot)
        self.capacity = capacity

    def hold(self, adapter: ServedAdapter) -> None:
        """Count a lease."""
        if adapter.num_running == 0:
            self._used = [used + taken for used, taken in zip(self._used, adapter.room, strict=True)]
        adapter.num_running += 1

    def let_go(self, adapter: ServedAdapter) -> None:
        """Undo a `hold`."""
        adapter.num_running -= 1
        if adapter.num_running == 0:
            self._used = [used - taken for used, taken in zip(self._used, adapter.room, strict=True)]

    def could_have_room(self, adapter: ServedAdapter) -> bool:
        """True if resident, or fitting beside leased adapters but for fragmentation."""
        return adapter.slot is not None or all(
            used + asked <= total
            for used, asked, total in zip(self._used, adapter.room, self.totals, strict=True)
        )

    def bring_in(self, adapter: ServedAdapter, tenant: int, standing: Standing[ServedAdapter] | None) -> bool:
        """Make the adapter resident, evicting idle adapters.

        Returns False, without evictions, on failure and while `is_over`.  standing: None for a single tenant.
        """
        if self.is_over:
            return False
        if adapter.slot is not None:
            return True
        runs = self._alloc(adapter)
        if runs is None and self.could_have_room(adapter):
            leaving = self._may_leave(adapter.room, tenant, standing)
            if self._could_fit(adapter, leaving):
                for other in leaving:
                    self.evict(other)
                    runs = self._alloc(adapter)
                    if runs is not None:
                        break
        if runs is None:
            return False
        slot = heapq.heappop(self._free_slots)
        self._generations[slot] += 1
        adapter.slot, adapter.generation, adapter.runs = slot, self._generations[slot], runs
        self.adapters[adapter.uid] = adapter
        self.num_loads += 1
        self.num_pages_loaded += adapter.num_pages
        self._on_event(Load(adapter.adapter_id, slot, adapter.generation, runs))
        return True

    def evict_idle(self, standing: Standing[ServedAdapter] | None) -> bool:
        """Evict the first idle adapter; False if none."""
        leaving = self._may_leave((0,) * len(self.totals), NOBODY, standing)
        if leaving:
            self.evict(leaving[0])
        return bool(leaving)

    def evict(self, adapter: ServedAdapter) -> None:
        assert adapter.slot is not None
        assert adapter.num_running == 0, "a leased adapter stays"
        self._on_event(Evict(adapter.adapter_id, adapter.slot, adapter.generation))
        self.pages.free(adapter.runs)
        heapq.heappush(self._free_slots, adapter.slot)
        del self.adapters[adapter.uid]
        adapter.slot, adapter.runs = None, {}
        self.num_evictions += 1

    def _alloc(self, adapter: ServedAdapter) -> Runs | None:
        return self.pages.alloc(adapter.shard_pages) if len(self.adapters) < self.capacity else None

    def _could_fit(self, adapter: ServedAdapter, leaving: Sequence[ServedAdapter]) -> bool:
        if not leaving or len(self.adapters) - len(leaving) >= self.capacity:
            return False
        gone = {other.uid for other in leaving}
        staying = [other.runs for other in self.adapters.values() if other.uid not in gone]
        return self.pages.could_alloc(adapter.shard_pages, staying)

    def _may_leave(
        self, room: tuple[int, ...], tenant: int, standing: Standing[ServedAdapter] | None
    ) -> Sequence[ServedAdapter]:
        return by_recency(self.adapters.values()) if standing is None else standing.may_leave(tenant, room)
