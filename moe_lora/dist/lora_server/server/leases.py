"""Which instances may use which adapters of the LoRA Server, and where these lie.

The leader keeps one `LeaseTable` for all instances.  It decides only: what is to be done comes out as events
(`take_events`), and times come in as arguments.  An adapter is served in one slot; the slot's generation
grows with every new content, so that a put of an instance whose lease has ended is told apart.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from moe_lora.config import MAX_COUNT
from moe_lora.core.errors import AdapterNotFoundError, ConfigError
from moe_lora.policies.admission import admissible, by_recency
from moe_lora.policies.arena_shares import ANYBODY, NOBODY, ArenaShares, Asker

from .lease_shares import Standing
from .server_pages import Runs, ServerPages, ShardPages


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


@dataclass(eq=False)
class ServedAdapter:
    """A registered adapter: what it takes, where it lies (slot None: nowhere), who uses it.

    num_running: instances that hold a lease.  num_waiting: instances that wait for one.  retired: no
    longer registered, but still held or waited for.  room: places and pages of each rank that it takes.
    owner: the tenant that was given a lease of it last.
    """

    uid: int
    adapter_id: str
    shard_pages: ShardPages
    room: tuple[int, ...]
    owner: int = NOBODY
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
        return sum(self.room[1:])


@dataclass(frozen=True, eq=False)
class Waiter:
    """An instance that waits for an adapter since arrival_s, for a tenant's request."""

    instance: str
    adapter: ServedAdapter
    arrival_s: float
    tenant: int

    @property
    def adapter_uid(self) -> tuple[int, int]:
        return self.adapter.uid, self.tenant  # for another tenant others may leave


@dataclass(frozen=True, kw_only=True)
class LeaseStats:
    """Now: adapters resident, leases held, acquires waiting, bytes of the pages taken.  Since the start:
    adapters loaded and evicted, bytes of the pages loaded.
    """

    num_resident: int
    num_leases: int
    num_waiting: int
    num_loads: int
    num_evictions: int
    resident_bytes: int
    loaded_bytes: int


class LeaseTable:
    """Shares `capacity` slots and the ranks' pages among all instances.

    Leases are given first come first served over all instances; an acquire whose adapter finds no place is
    passed over until it has waited longer than starvation_s, from when on it stops younger ones.  Of several
    tenants it does not stop those whose adapter is in use already, those come first that stay within their
    shares, and what may leave for whom `Standing` says.  Idle adapters stay until their place is needed and
    leave least recently used first.

    capacity: adapters resident at once.  pages_per_rank: pages of each server rank's arena.  page_bytes:
    bytes of a page.  Raises ConfigError for a capacity below 1.
    """

    def __init__(
        self,
        capacity: int,
        pages_per_rank: Sequence[int],
        page_bytes: int,
        *,
        starvation_s: float,
    ) -> None:
        self.capacity = 0
        self._starvation_s = starvation_s
        self._page_bytes = page_bytes
        self._pages = ServerPages(pages_per_rank)
        self._shares = ArenaShares()
        self._standing: Standing[ServedAdapter] | None = None
        self._portions = self._shares.portions(0.0)
        """When all that wait were last looked at."""
        self._is_current = False
        """Whether `_standing` is what it is now."""
        self._events: list[Event] = []
        self._uids = itertools.count(1)
        self._adapters: dict[str, ServedAdapter] = {}
        self._resident: dict[int, ServedAdapter] = {}
        self._generations: list[int] = []
        self._free_slots: list[int] = []
        self._leases: dict[str, dict[str, Grant]] = {}
        self._queue: dict[tuple[str, str], Waiter] = {}
        self._num_loads = self._num_evictions = self._loaded_bytes = 0
        self._used = [0] * (1 + len(pages_per_rank))
        """Places, and pages of each rank, of the adapters with a lease."""
        self.resize(capacity, 0.0)

    def take_events(self) -> list[Event]:
        """The events since the last call, to be carried out in this order."""
        events, self._events = self._events, []
        return events

    def register(self, adapter_id: str, shard_pages: ShardPages) -> None:
        """Make the adapter (content hash) known; once more changes nothing.

        shard_pages: pages per server rank and layer; layers of no pages may be left out.
        Raises ConfigError if a rank could never hold its shard, ValueError if the adapter is known with
        other shards.
        """
        wanted = {
            rank: {layer: num_pages for layer, num_pages in layers.items() if num_pages}
            for rank, layers in shard_pages.items()
            if any(layers.values())
        }
        known = self._adapters.get(adapter_id)
        if known is None:
            self._check_fits(adapter_id, wanted)
            pages = (sum(wanted.get(rank, {}).values()) for rank in range(len(self._pages.pages_per_rank)))
            self._adapters[adapter_id] = ServedAdapter(next(self._uids), adapter_id, wanted, (1, *pages))
        elif known.shard_pages != wanted:
            raise ValueError(
                f"adapter {adapter_id!r} is known with other shard sizes; an id stands for one content, "
                "register other content under an id of its own"
            )
        else:
            known.retired = False

    def unregister(self, adapter_id: str, now_s: float) -> None:
        """Refuse new acquires; instances that hold a lease or wait for one are served to the end.

        Raises AdapterNotFoundError.
        """
        adapter = self._registered(adapter_id)
        adapter.retired = True
        self._settle(adapter)
        self.grant_waiting(now_s)

    def acquire(self, instance: str, adapter_id: str, now_s: float, asker: Asker = ANYBODY) -> Grant | None:
        """The instance's lease, if it can have one now; else it waits and a Grant comes later.

        asker: whose request needs it.

        A lease given by this call is among the events too.  An instance that already holds the lease gets
        the same one back and no event; one that already waits keeps its place, for whichever asker's turn is
        first now.
        Raises AdapterNotFoundError.
        """
        lease = self._leases.get(instance, {}).get(adapter_id)
        if waiter := self._queue.get((instance, adapter_id)):
            lease = self._wait_for(waiter, self._shares.ask(*asker, now_s), now_s)
        elif lease is None:
            adapter = self._registered(adapter_id)
            waiter = Waiter(instance, adapter, now_s, self._shares.ask(*asker, now_s))
            self._is_current = False
            self._queue[instance, adapter_id] = waiter
            waiter.adapter.num_waiting += 1
            if np.array_equal(self._shares.portions(now_s), self._portions):
                lease = self._grant_youngest(waiter, now_s)
            else:  # with other shares older ones may have become admissible
                self.grant_waiting(now_s)
                lease = self._leases.get(instance, {}).get(adapter_id)
        return lease

    def release(self, instance: str, adapter_id: str, now_s: float) -> bool:
        """End the instance's lease; False if it holds none."""
        if adapter_id not in self._leases.get(instance, {}):
            return False
        self._end_lease(instance, adapter_id, now_s)
        self.grant_waiting(now_s)
        return True

    def cancel(self, instance: str, adapter_id: str, now_s: float) -> bool:
        """Stop waiting; False if the instance does not wait.

        A lease that was granted meanwhile stands: the instance releases it when the Grant reaches it.
        """
        if (instance, adapter_id) not in self._queue:
            return False
        self._end_wait(instance, adapter_id)
        self.grant_waiting(now_s)
        return True

    def prefetch(self, adapter_id: str, now_s: float) -> bool:
        """Make the adapter resident without a lease; False if evicting idle adapters would not do.

        Raises AdapterNotFoundError.
        """
        adapter = self._registered(adapter_id)
        if not self._bring_in(adapter, adapter.owner, now_s):
            return False
        adapter.last_used_s = now_s
        return True

    def drop_instance(self, instance: str, now_s: float) -> None:
        """End all leases and waits of an instance that is gone."""
        for adapter_id in [adapter_id for waiting, adapter_id in self._queue if waiting == instance]:
            self._end_wait(instance, adapter_id)
        for adapter_id in list(self._leases.get(instance, {})):
            self._end_lease(instance, adapter_id, now_s)
        self._leases.pop(instance, None)
        self.grant_waiting(now_s)

    def grant_waiting(self, now_s: float) -> None:
        """Give what can be had now to those that wait: what fell free, what absent tenants no longer keep."""
        self._is_current = False
        while len(self._resident) > self.capacity:
            if not self._evict_idle(now_s):
                return
        while self._grant_first(now_s):
            pass
        self._portions = self._shares.portions(now_s)

    def resize(self, capacity: int, now_s: float) -> None:
        """Change the number of adapters resident at once.

        Shrinking evicts idle adapters; while leases keep more than `capacity` resident, none is given.
        Slot numbers stay below the largest capacity there ever was.  Raises ConfigError below 1.
        """
        if capacity < 1:
            raise ConfigError(
                f"lora_server.capacity={capacity} leaves no place for an adapter; choose 1 or more"
            )
        for slot in range(len(self._generations), capacity):
            self._generations.append(0)
            heapq.heappush(self._free_slots, slot)
        self.capacity, self._is_current = capacity, False
        self.grant_waiting(now_s)

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

    def residents(self) -> Iterable[ServedAdapter]:
        """The resident adapters, to be read only."""
        return self._resident.values()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def stats(self) -> LeaseStats:
        """Counts, and bytes of whole pages, for metrics."""
        return LeaseStats(
            num_resident=len(self._resident),
            num_leases=sum(len(leases) for leases in self._leases.values()),
            num_waiting=len(self._queue),
            num_loads=self._num_loads,
            num_evictions=self._num_evictions,
            resident_bytes=sum(adapter.num_pages for adapter in self._resident.values()) * self._page_bytes,
            loaded_bytes=self._loaded_bytes,
        )

    # Leases

    def _wait_for(self, waiter: Waiter, tenant: int, now_s: float) -> Grant | None:
        """The lease that comes if one waits for this tenant from now on, whose turn may be an earlier one."""
        self._is_current = False
        standing, earlier = self._stand(now_s), replace(waiter, tenant=tenant)
        if standing is None or _turn(standing, earlier) >= _turn(standing, waiter):
            return None
        self._queue[waiter.instance, waiter.adapter.adapter_id] = earlier
        self.grant_waiting(now_s)
        return self._leases.get(waiter.instance, {}).get(waiter.adapter.adapter_id)

    def _registered(self, adapter_id: str) -> ServedAdapter:
        """The adapter that new acquires for this id get.  Raises AdapterNotFoundError."""
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.retired:
            raise AdapterNotFoundError(f"adapter {adapter_id!r} is not registered with the LoRA Server")
        return adapter

    def _grant_youngest(self, waiter: Waiter, now_s: float) -> Grant | None:
        """The lease of an acquire just queued, whose coming has changed nothing for older ones."""
        if not self._could_have_room(waiter.adapter):
            return None
        standing = self._stand(now_s)
        for older in self._queue.values():
            if now_s - older.arrival_s <= self._starvation_s:
                break
            if standing is None or (
                not _takes_nothing(waiter) and _turn(standing, older) <= _turn(standing, waiter)
            ):
                return None
        fits = self._bring_in(waiter.adapter, waiter.tenant, now_s)
        return self._grant(waiter, now_s) if fits else None

    def _grant_first(self, now_s: float) -> bool:
        """Grant a lease, or of one tenant all that can be; False once no more waits that could have one."""
        queue = list(self._queue.values())
        if not any(self._could_have_room(waiter.adapter) for waiter in queue):
            return False
        standing = self._stand(now_s)
        if standing is not None:
            queue.sort(key=partial(_turn, standing))
        found = admissible(
            queue,
            lambda waiter: self._bring_in(waiter.adapter, waiter.tenant, now_s),
            now_s,
            self._starvation_s,
            None if standing is None else _takes_nothing,
        )
        for waiter in found:
            self._grant(waiter, now_s)
            if standing is not None:
                return True  # it may be another's turn now
        return False

    def _grant(self, waiter: Waiter, now_s: float) -> Grant:
        adapter = waiter.adapter
        assert adapter.slot is not None
        lease = Grant(waiter.instance, adapter.adapter_id, adapter.slot, adapter.generation)
        if adapter.num_running == 0:
            self._used = [used + asked for used, asked in zip(self._used, adapter.room, strict=True)]
        adapter.num_running += 1
        adapter.last_used_s = now_s
        adapter.owner, self._is_current = waiter.tenant, False
        self._leases.setdefault(waiter.instance, {})[adapter.adapter_id] = lease
        self._end_wait(waiter.instance, adapter.adapter_id)
        self._events.append(lease)
        return lease

    def _end_wait(self, instance: str, adapter_id: str) -> None:
        adapter = self._queue.pop((instance, adapter_id)).adapter
        adapter.num_waiting -= 1
        self._is_current = False
        self._settle(adapter)

    def _end_lease(self, instance: str, adapter_id: str, now_s: float) -> None:
        del self._leases[instance][adapter_id]
        adapter = self._adapters[adapter_id]
        adapter.num_running -= 1
        if adapter.num_running == 0:
            self._used = [used - asked for used, asked in zip(self._used, adapter.room, strict=True)]
        adapter.last_used_s = now_s
        self._shares.stay((adapter.owner,), now_s)
        self._is_current = False
        self._settle(adapter)

    # Places

    def _settle(self, adapter: ServedAdapter) -> None:
        """Forget a retired adapter that nobody holds or waits for."""
        if adapter.retired and adapter.num_running == 0 and adapter.num_waiting == 0:
            if adapter.slot is not None:
                self._evict(adapter)
            del self._adapters[adapter.adapter_id]

    def _bring_in(self, adapter: ServedAdapter, tenant: int, now_s: float) -> bool:
        """Make the adapter resident, evicting idle ones; if that can't be, nothing is evicted.

        False too while more are resident than should be, since the capacity was lowered.
        """
        if len(self._resident) > self.capacity:
            return False
        if adapter.slot is not None:
            return True
        runs = self._alloc(adapter)
        if runs is None and self._could_have_room(adapter):
            leaving = self._may_leave(adapter.room, tenant, now_s)
            if self._could_fit(adapter, leaving):
                for other in leaving:
                    self._evict(other)
                    runs = self._alloc(adapter)
                    if runs is not None:
                        break
        if runs is None:
            return False
        self._is_current = False
        slot = heapq.heappop(self._free_slots)
        self._generations[slot] += 1
        adapter.slot, adapter.generation, adapter.runs = slot, self._generations[slot], runs
        self._resident[adapter.uid] = adapter
        self._num_loads += 1
        self._loaded_bytes += adapter.num_pages * self._page_bytes
        self._events.append(Load(adapter.adapter_id, slot, adapter.generation, runs))
        return True

    def _alloc(self, adapter: ServedAdapter) -> Runs | None:
        return self._pages.alloc(adapter.shard_pages) if len(self._resident) < self.capacity else None

    def _could_have_room(self, adapter: ServedAdapter) -> bool:
        """Whether it has, or might have were all idle adapters gone and all free pages in one piece."""
        totals = self.capacity, *self._pages.pages_per_rank
        return adapter.slot is not None or all(
            used + asked <= total for used, asked, total in zip(self._used, adapter.room, totals, strict=True)
        )

    def _could_fit(self, adapter: ServedAdapter, leaving: Sequence[ServedAdapter]) -> bool:
        if not leaving or len(self._resident) - len(leaving) >= self.capacity:
            return False
        gone = {other.uid for other in leaving}
        staying = [other.runs for other in self._resident.values() if other.uid not in gone]
        return self._pages.could_alloc(adapter.shard_pages, staying)

    def _may_leave(self, room: tuple[int, ...], tenant: int, now_s: float) -> list[ServedAdapter]:
        """Idle adapters that may leave for so much room of this tenant's, the first to go first."""
        standing = self._stand(now_s)
        if standing is None:
            return by_recency(self._resident.values())
        return standing.may_leave(tenant, room)

    def _stand(self, now_s: float) -> Standing[ServedAdapter] | None:
        """What tenants hold now; None where there is one."""
        if not self._is_current and self._shares.num_tenants > 1:
            self._is_current, self._standing = True, None
            residents = list(self._resident.values())
            users = {one.owner for one in residents if one.num_running}
            self._shares.stay(users | {waiter.tenant for waiter in self._queue.values()}, now_s)
            if self._shares.is_divided(now_s):
                totals = self.capacity, *self._pages.pages_per_rank
                self._standing = Standing(self._shares, residents, totals, now_s)
        return self._standing

    def _evict_idle(self, now_s: float) -> bool:
        """Evict the first adapter without a lease; False if there is none."""
        nothing = (0,) * (1 + len(self._pages.pages_per_rank))
        leaving = self._may_leave(nothing, NOBODY, now_s)
        if leaving:
            self._evict(leaving[0])
        return bool(leaving)

    def _evict(self, adapter: ServedAdapter) -> None:
        assert adapter.slot is not None
        assert adapter.num_running == 0, "a leased adapter stays"
        self._events.append(Evict(adapter.adapter_id, adapter.slot, adapter.generation))
        self._pages.free(adapter.runs)
        heapq.heappush(self._free_slots, adapter.slot)
        del self._resident[adapter.uid]
        self._is_current = False
        adapter.slot, adapter.runs = None, {}
        self._num_evictions += 1

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


def _takes_nothing(waiter: Waiter) -> bool:
    return waiter.adapter.num_running > 0


def _turn(standing: Standing[ServedAdapter], waiter: Waiter) -> float:
    return standing.turn(waiter.tenant, waiter.adapter.room)


def _num_fitting(num_pages: int, sizes: list[int]) -> int:
    """How many adapters fit into the pages even if they are the largest ones."""
    largest = max(sizes)
    for count, size in enumerate(sorted(sizes, reverse=True)):
        if size > num_pages:
            return count
        num_pages -= size
    return len(sizes) + (num_pages // largest if largest else MAX_COUNT)
