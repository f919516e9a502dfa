"""Which instances may use which adapters of the LoRA Server.

The leader keeps one `LeaseTable` for all instances.  It decides only: what is to be done comes out as events
(`take_events`), and times come in as arguments.  An adapter is served in one slot; the slot's generation
grows with every new content, so that a put of an instance whose lease has ended is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_lora.policies.admission import admissible

from .residency import Event, Grant, ServedAdapter, ServerResidency, ShardPages


@dataclass(frozen=True, eq=False)
class Waiter:
    """An instance that waits for an adapter since arrival_s."""

    instance: str
    adapter: ServedAdapter
    arrival_s: float

    @property
    def adapter_uid(self) -> int:
        return self.adapter.uid


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
    passed over until it has waited longer than starvation_s, from when on it stops younger ones.  Idle
    adapters stay until their place is needed and leave least recently used first.

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
        self._events: list[Event] = []
        self._residency = ServerResidency(capacity, pages_per_rank, page_bytes, self._events)
        self._starvation_s = starvation_s
        self._leases: dict[str, dict[str, Grant]] = {}
        self._queue: dict[tuple[str, str], Waiter] = {}

    def take_events(self) -> list[Event]:
        """The events since the last call, to be carried out in this order."""
        events = list(self._events)
        self._events.clear()
        return events

    def register(self, adapter_id: str, shard_pages: ShardPages) -> None:
        """Make the adapter (content hash) known; once more changes nothing.

        shard_pages: pages per server rank and layer; layers of no pages may be left out.
        Raises ConfigError if a rank could never hold its shard, ValueError if the adapter is known with
        other shards.
        """
        self._residency.add(adapter_id, shard_pages)

    def unregister(self, adapter_id: str, now_s: float) -> None:
        """Refuse new acquires; instances that hold a lease or wait for one are served to the end.

        Raises AdapterNotFoundError.
        """
        adapter = self._residency.registered(adapter_id)
        adapter.retired = True
        self._residency.settle(adapter)
        self._grant_waiting(now_s)

    def acquire(self, instance: str, adapter_id: str, now_s: float) -> Grant | None:
        """The instance's lease, if it can have one now; else it waits and a Grant comes later.

        A lease given by this call is among the events too.  An instance that already holds the lease gets
        the same one back and no event; one that already waits keeps its place.
        Raises AdapterNotFoundError.
        """
        lease = self._leases.get(instance, {}).get(adapter_id)
        if lease is None and (instance, adapter_id) not in self._queue:
            waiter = Waiter(instance, self._residency.registered(adapter_id), now_s)
            self._queue[instance, adapter_id] = waiter
            waiter.adapter.num_waiting += 1
            lease = self._grant_youngest(waiter, now_s)
        return lease

    def release(self, instance: str, adapter_id: str, now_s: float) -> bool:
        """End the instance's lease; False if it holds none."""
        if adapter_id not in self._leases.get(instance, {}):
            return False
        self._end_lease(instance, adapter_id, now_s)
        self._grant_waiting(now_s)
        return True

    def cancel(self, instance: str, adapter_id: str, now_s: float) -> bool:
        """Stop waiting; False if the instance does not wait.

        A lease that was granted meanwhile stands: the instance releases it when the Grant reaches it.
        """
        if (instance, adapter_id) not in self._queue:
            return False
        self._end_wait(instance, adapter_id)
        self._grant_waiting(now_s)
        return True

    def prefetch(self, adapter_id: str, now_s: float) -> bool:
        """Make the adapter resident without a lease; False if evicting idle adapters would not do.

        Raises AdapterNotFoundError.
        """
        adapter = self._residency.registered(adapter_id)
        if self._residency.overfull or not self._residency.bring_in(adapter):
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
        self._grant_waiting(now_s)

    def resize(self, capacity: int, now_s: float) -> None:
        """Change the number of adapters resident at once.

        Shrinking evicts idle adapters; while leases keep more than `capacity` resident, none is given.
        Slot numbers stay below the largest capacity there ever was.  Raises ConfigError below 1.
        """
        self._residency.set_capacity(capacity)
        self._grant_waiting(now_s)

    @property
    def capacity(self) -> int:
        """Adapters resident at once."""
        return self._residency.capacity

    def max_capacity(self) -> int | None:
        """The largest capacity that memory holds (see `ServerResidency.max_capacity`)."""
        return self._residency.max_capacity()

    def residents(self) -> Iterable[ServedAdapter]:
        """The resident adapters, to be read only."""
        return self._residency.resident.values()

    def stats(self) -> LeaseStats:
        """Counts and bytes for metrics."""
        residency = self._residency
        return LeaseStats(
            num_resident=len(residency.resident),
            num_leases=sum(len(leases) for leases in self._leases.values()),
            num_waiting=len(self._queue),
            num_loads=residency.num_loads,
            num_evictions=residency.num_evictions,
            resident_bytes=residency.resident_bytes,
            loaded_bytes=residency.loaded_bytes,
        )

    def _grant_youngest(self, waiter: Waiter, now_s: float) -> Grant | None:
        """The lease of an acquire just queued; older ones can't have become admissible by its coming."""
        oldest = next(iter(self._queue.values()))
        stopped = oldest is not waiter and now_s - oldest.arrival_s > self._starvation_s
        if stopped or self._residency.overfull or not self._residency.bring_in(waiter.adapter):
            return None
        return self._grant(waiter, now_s)

    def _grant_waiting(self, now_s: float) -> None:
        """Give what fell free to those that wait."""
        residency = self._residency
        while residency.overfull:
            if not residency.evict_idle():
                return
        queue = list(self._queue.values())
        for waiter in admissible(queue, lambda w: residency.bring_in(w.adapter), now_s, self._starvation_s):
            self._grant(waiter, now_s)

    def _grant(self, waiter: Waiter, now_s: float) -> Grant:
        adapter = waiter.adapter
        assert adapter.slot is not None
        lease = Grant(waiter.instance, adapter.adapter_id, adapter.slot, adapter.generation)
        self._residency.pin(adapter, now_s)
        self._leases.setdefault(waiter.instance, {})[adapter.adapter_id] = lease
        self._end_wait(waiter.instance, adapter.adapter_id)
        self._events.append(lease)
        return lease

    def _end_wait(self, instance: str, adapter_id: str) -> None:
        adapter = self._queue.pop((instance, adapter_id)).adapter
        adapter.num_waiting -= 1
        self._residency.settle(adapter)

    def _end_lease(self, instance: str, adapter_id: str, now_s: float) -> None:
        del self._leases[instance][adapter_id]
        adapter = self._residency.in_use(adapter_id)
        self._residency.unpin(adapter, now_s)
        self._residency.settle(adapter)
