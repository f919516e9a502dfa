"""Which adapters lie on the LoRA Server, in which slot and on which pages of each rank."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from moe_lora.cache.pages import PageAllocator
from moe_lora.config import MAX_COUNT
from moe_lora.core.errors import AdapterNotFoundError, ConfigError
from moe_lora.policies.admission import least_recently_used

# What the lease table has decided; the caller carries the events out in the order they come.


Run: TypeAlias = tuple[int, int]
"""(first page, number of pages) in the arena of one server rank."""
Runs: TypeAlias = Mapping[int, Mapping[int, Run]]
"""server rank -> layer -> run.  Ranks and layers of which the adapter has nothing are left out."""


@dataclass(frozen=True)
class Load:
    """Bring the adapter's shards into these pages, layer by layer, and serve them as (slot, generation)."""

    adapter_id: str
    slot: int
    generation: int
    runs: Runs


@dataclass(frozen=True)
class Evict:
    """Stop serving (slot, generation): its pages belong to whatever is loaded next."""

    adapter_id: str
    slot: int
    generation: int


@dataclass(frozen=True)
class Grant:
    """The instance holds a lease: its puts for this adapter carry slot and generation from now on.

    The adapter's Load was issued before, perhaps just now: a put may have to wait for its layer.
    """

    instance: str
    adapter_id: str
    slot: int
    generation: int


Event: TypeAlias = Load | Evict | Grant


# The page arenas of all server ranks, kept by the leader so that a load names its pages.


ShardPages: TypeAlias = Mapping[int, Mapping[int, int]]
"""server rank -> layer -> pages that the adapter's shard takes there."""


class ServerPages:
    """One page allocator per server rank; an adapter takes one run of pages per rank and layer."""

    def __init__(self, pages_per_rank: Sequence[int]) -> None:
        self.pages_per_rank = tuple(pages_per_rank)
        self._ranks = [PageAllocator(num_pages) for num_pages in pages_per_rank]

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free pages of each rank."""
        return tuple(pages.num_free for pages in self._ranks)

    def alloc(self, shard_pages: ShardPages) -> Runs | None:
        """A run for every layer on every rank, or None, and nothing taken, if one finds no place."""
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
        """Give back what `alloc` gave."""
        for rank, layers in runs.items():
            for first, num_pages in layers.values():
                self._ranks[rank].free(first, num_pages)

    def could_alloc(self, shard_pages: ShardPages, pinned: Sequence[Runs]) -> bool:
        """Whether `alloc` would succeed if all but the `pinned` runs were given back."""
        return all(
            fits(
                self.pages_per_rank[rank],
                [run for runs in pinned for run in runs.get(rank, {}).values()],
                layers.values(),
            )
            for rank, layers in shard_pages.items()
        )


def fits(num_pages: int, taken: Iterable[Run], wanted: Iterable[int]) -> bool:
    """Whether runs of the wanted lengths find a place beside the taken ones, first fit in this order."""
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


@dataclass(eq=False)
class ServedAdapter:
    """A registered adapter: what it takes, where it lies (slot None: nowhere), who uses it.

    num_running: instances that hold a lease.  num_waiting: instances that wait for one.  retired: no
    longer registered, but still held or waited for.
    """

    uid: int
    adapter_id: str
    shard_pages: ShardPages
    slot: int | None = None
    generation: int = 0
    runs: Runs = field(default_factory=dict)
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float = -math.inf
    retired: bool = False

    @property
    def num_pages(self) -> int:
        """Pages over all ranks and layers."""
        return sum(sum(layers.values()) for layers in self.shard_pages.values())


class ServerResidency:
    """The known adapters and the places of the resident ones; who may use them is the lease table's matter.

    capacity: adapters resident at once.  pages_per_rank: pages of each server rank's arena.  page_bytes:
    bytes of a page.  events: Load and Evict are appended here.  Raises ConfigError for a capacity below 1.
    """

    def __init__(
        self, capacity: int, pages_per_rank: Sequence[int], page_bytes: int, events: list[Event]
    ) -> None:
        self.capacity = 0
        self.resident: dict[int, ServedAdapter] = {}
        self.num_loads = self.num_evictions = self.loaded_bytes = 0
        self._pages = ServerPages(pages_per_rank)
        self._page_bytes = page_bytes
        self._events = events
        self._uids = itertools.count(1)
        self._adapters: dict[str, ServedAdapter] = {}
        self._generations: list[int] = []
        self._free_slots: list[int] = []
        self._num_leased = 0
        self.set_capacity(capacity)

    def set_capacity(self, capacity: int) -> None:
        """Change the number of adapters resident at once; evicts nothing.

        Slot numbers stay below the largest capacity there ever was.  Raises ConfigError below 1.
        """
        if capacity < 1:
            raise ConfigError(
                f"lora_server.capacity={capacity} leaves no place for an adapter; choose 1 or more"
            )
        for slot in range(len(self._generations), capacity):
            self._generations.append(0)
            heapq.heappush(self._free_slots, slot)
        self.capacity = capacity

    def max_capacity(self) -> int | None:
        """The largest number of adapters that every rank's pages hold, whichever they are; None if none is
        registered.

        Those that are not registered yet count as large as the largest.  Pages that lie between others and
        fit no run are not considered: an adapter that finds no place for that waits.
        """
        known = [adapter.shard_pages for adapter in self._adapters.values() if not adapter.retired]
        if not known:
            return None
        return min(
            _num_fitting(num_pages, [sum(pages.get(rank, {}).values()) for pages in known])
            for rank, num_pages in enumerate(self._pages.pages_per_rank)
        )

    @property
    def overfull(self) -> bool:
        """Whether more adapters are resident than should be, since the capacity was lowered."""
        return len(self.resident) > self.capacity

    @property
    def resident_bytes(self) -> int:
        """Bytes of the whole pages that resident adapters take."""
        return sum(adapter.num_pages for adapter in self.resident.values()) * self._page_bytes

    def add(self, adapter_id: str, shard_pages: ShardPages) -> None:
        """Make the adapter known.  Raises ConfigError if a rank could never hold its shard, ValueError if
        it is known with other shards.
        """
        wanted = {
            rank: {layer: num_pages for layer, num_pages in layers.items() if num_pages}
            for rank, layers in shard_pages.items()
            if any(layers.values())
        }
        known = self._adapters.get(adapter_id)
        if known is None:
            self._check_fits(adapter_id, wanted)
            self._adapters[adapter_id] = ServedAdapter(next(self._uids), adapter_id, wanted)
        elif known.shard_pages != wanted:
            raise ValueError(
                f"adapter {adapter_id!r} is known with other shard sizes; an id stands for one content, "
                "register other content under an id of its own"
            )
        else:
            known.retired = False

    def registered(self, adapter_id: str) -> ServedAdapter:
        """The adapter that new acquires for this id get.  Raises AdapterNotFoundError."""
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.retired:
            raise AdapterNotFoundError(f"adapter {adapter_id!r} is not registered with the LoRA Server")
        return adapter

    def in_use(self, adapter_id: str) -> ServedAdapter:
        """The adapter of this id that is held or waited for, be it retired."""
        return self._adapters[adapter_id]

    def pin(self, adapter: ServedAdapter, now_s: float) -> None:
        """An instance got a lease of the resident adapter."""
        self._num_leased += adapter.num_running == 0
        adapter.num_running += 1
        adapter.last_used_s = now_s

    def unpin(self, adapter: ServedAdapter, now_s: float) -> None:
        """A lease ended."""
        adapter.num_running -= 1
        adapter.last_used_s = now_s
        self._num_leased -= adapter.num_running == 0

    def settle(self, adapter: ServedAdapter) -> None:
        """Forget a retired adapter that nobody holds or waits for."""
        if adapter.retired and adapter.num_running == 0 and adapter.num_waiting == 0:
            if adapter.slot is not None:
                self._evict(adapter)
            del self._adapters[adapter.adapter_id]

    def bring_in(self, adapter: ServedAdapter) -> bool:
        """Make the adapter resident, evicting idle ones; if that can't be, nothing is evicted."""
        if adapter.slot is not None:
            return True
        runs = self._alloc(adapter)
        if runs is None and self._could_fit(adapter):
            while runs is None and self.evict_idle():
                runs = self._alloc(adapter)
        if runs is None:
            return False
        slot = heapq.heappop(self._free_slots)
        self._generations[slot] += 1
        adapter.slot, adapter.generation, adapter.runs = slot, self._generations[slot], runs
        self.resident[adapter.uid] = adapter
        self.num_loads += 1
        self.loaded_bytes += adapter.num_pages * self._page_bytes
        self._events.append(Load(adapter.adapter_id, slot, adapter.generation, runs))
        return True

    def evict_idle(self) -> bool:
        """Evict the least recently used adapter without a lease; False if there is none."""
        victim = least_recently_used(self.resident.values())
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _alloc(self, adapter: ServedAdapter) -> Runs | None:
        return self._pages.alloc(adapter.shard_pages) if len(self.resident) < self.capacity else None

    def _could_fit(self, adapter: ServedAdapter) -> bool:
        if self._num_leased >= self.capacity:
            return False
        leased = [other.runs for other in self.resident.values() if other.num_running]
        return self._pages.could_alloc(adapter.shard_pages, leased)

    def _evict(self, adapter: ServedAdapter) -> None:
        assert adapter.slot is not None
        assert adapter.num_running == 0, "a leased adapter stays"
        self._events.append(Evict(adapter.adapter_id, adapter.slot, adapter.generation))
        self._pages.free(adapter.runs)
        heapq.heappush(self._free_slots, adapter.slot)
        del self.resident[adapter.uid]
        adapter.slot, adapter.runs = None, {}
        self.num_evictions += 1

    def _check_fits(self, adapter_id: str, shard_pages: ShardPages) -> None:
        for rank, layers in shard_pages.items():
            needed, given = sum(layers.values()), self._pages.pages_per_rank[rank]
            if needed > given:
                least_gb = math.ceil(needed * self._page_bytes / 1e6) / 1e3
                raise ConfigError(
                    f"adapter {adapter_id!r} needs {needed} pages on LoRA Server rank {rank}, which has "
                    f"{given} (lora_server.memory_gb={given * self._page_bytes / 1e9:g} a rank); "
                    f"choose lora_server.memory_gb={least_gb:g} or more"
                )


def _num_fitting(num_pages: int, sizes: list[int]) -> int:
    """How many adapters fit into the pages even if they are the largest ones."""
    largest = max(sizes)
    for count, size in enumerate(sorted(sizes, reverse=True)):
        if size > num_pages:
            return count
        num_pages -= size
    return len(sizes) + (num_pages // largest if largest else MAX_COUNT)
