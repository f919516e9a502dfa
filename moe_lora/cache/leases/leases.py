# SPDX-License-Identifier: Apache-2.0
"""Leases of the LoRA Server's adapters, with actions as events and times as arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from moe_lora.core.errors import AdapterNotFoundError, ConfigError
from moe_lora.core.records import LeaseStats
from moe_lora.policies.caching.arena_shares import ArenaShares
from moe_lora.policies.caching.caching import ANYBODY, Asker

from .lease_queue import LeaseQueue, Standing, Waiter
from .residency import Evict, Load, Residency, ServedAdapter, ShardPages


@dataclass(frozen=True)
class Grant:
    """A lease.  Puts carry slot and generation: late puts are recognized.

    The Load event precedes, possibly just before: a put may wait for a layer.
    """

    instance: str
    adapter_id: str
    slot: int
    generation: int


Event: TypeAlias = Load | Evict | Grant


class LeaseTable:
    """Shares `capacity` slots and the ranks' pages among instances.

    `grant_due` grants freed room, once for all changes.  Raises ConfigError for a capacity below 1.
    """

    def __init__(
        self,
        capacity: int,
        pages_per_rank: Sequence[int],
        page_bytes: int,
        *,
        starvation_s: float,
    ) -> None:
        self._page_bytes = page_bytes
        self._events: list[Event] = []
        self._residency = Residency(pages_per_rank, self._events.append)
        self._queue = LeaseQueue(starvation_s)
        self._shares = ArenaShares()
        self._portions = self._shares.portions(0.0)
        self.is_due = False
        """A waiting lease may be possible now."""
        self._is_promised = False
        """Freed room belongs to waiters: newcomers wait too."""
        self._uids = itertools.count(1)
        self._adapters: dict[str, ServedAdapter] = {}
        self._leases: dict[str, dict[str, Grant]] = {}
        self.resize(capacity)

    @property
    def capacity(self) -> int:
        return self._residency.capacity

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def register(self, adapter_id: str, shard_pages: ShardPages) -> None:
        """Make the adapter (content hash) known; idempotent.

        Raises ConfigError if a rank can never hold the shard, ValueError for changed shards.
        """
        wanted = {
            rank: {layer: num_pages for layer, num_pages in layers.items() if num_pages}
            for rank, layers in shard_pages.items()
            if any(layers.values())
        }
        known = self._adapters.get(adapter_id)
        if known is None:
            self._residency.pages.check_fits(adapter_id, wanted, self._page_bytes)
            room = self._residency.room(wanted)
            self._adapters[adapter_id] = ServedAdapter(next(self._uids), adapter_id, wanted, room)
        elif known.shard_pages != wanted:
            raise ValueError(
                f"adapter {adapter_id!r} is known with other shard sizes; an id stands for one content, "
                "register other content under an id of its own"
            )
        else:
            known.retired = False

    def unregister(self, adapter_id: str) -> None:
        """Refuse new acquires; leases and waits continue.  Raises AdapterNotFoundError."""
        adapter = self._registered(adapter_id)
        adapter.retired = True
        self._settle(adapter)
        self._promise()

    def acquire(self, instance: str, adapter_id: str, now_s: float, asker: Asker = ANYBODY) -> Grant | None:
        """The instance's lease if available; else None, and a Grant event follows.

        A new lease is also an event.  A waiter keeps the place in the queue, for the asker of earliest turn.
        Raises AdapterNotFoundError.
        """
        lease = self._leases.get(instance, {}).get(adapter_id)
        if waiter := self._queue.get(instance, adapter_id):
            self._wait_for(waiter, self._shares.ask(*asker, now_s), now_s)
        elif lease is None:
            adapter = self._registered(adapter_id)
            waiter = Waiter(instance, adapter, now_s, self._shares.ask(*asker, now_s))
            is_alone = not self._queue
            self._queue.put(waiter)
            portions = self._shares.portions(now_s)
            if not is_alone and not np.array_equal(portions, self._portions):
                self._promise()  # older waiters may be admissible now
            self._portions = portions
            if is_alone or not self._is_promised:
                lease = self._grant_youngest(waiter, now_s)
        return lease

    def release(self, instance: str, adapter_id: str, now_s: float) -> bool:
        """End the instance's lease; False without a lease."""
        if adapter_id not in self._leases.get(instance, {}):
            return False
        self._end_lease(instance, adapter_id, now_s)
        return True

    def cancel(self, instance: str, adapter_id: str) -> bool:
        """Stop waiting; False without a wait.  The instance must release a lease granted meanwhile."""
        waiter = self._queue.get(instance, adapter_id)
        if waiter is None:
            return False
        self._end_wait(waiter)
        self._promise()
        return True

    def prefetch(self, adapter_id: str, now_s: float) -> bool:
        """Make the adapter resident without a lease; False without room.  Raises AdapterNotFoundError."""
        adapter = self._registered(adapter_id)
        if not self._residency.bring_in(adapter, adapter.owner, self._stand(now_s)):
            return False
        adapter.last_used_s = now_s
        return True

    def prefill(self, adapter_ids: Sequence[str]) -> None:
        """Make the adapters resident without events; the last is evicted first."""
        for before, adapter_id in enumerate(reversed(adapter_ids), start=-len(adapter_ids)):
            self.register(adapter_id, {})
            self.prefetch(adapter_id, float(before))
        self.take_events()

    def drop_instance(self, instance: str, now_s: float) -> None:
        """End a lost instance's leases and waits."""
        for waiter in [waiter for waiter in self._queue if waiter.instance == instance]:
            self._end_wait(waiter)
        for adapter_id in list(self._leases.get(instance, {})):
            self._end_lease(instance, adapter_id, now_s)
        self._leases.pop(instance, None)
        self._promise()

    def is_resident(self, adapter_id: str, generation: int) -> bool:
        """True if resident in this generation."""
        adapter = self._adapters.get(adapter_id)
        return adapter is not None and adapter.slot is not None and adapter.generation == generation

    def fail(self, adapter_id: str, now_s: float) -> set[str]:
        """Forget a failed adapter.  Returns the instances whose leases and waits end.

        Slot and pages are free at once: puts of the generation are stale.
        """
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            return set()
        adapter.retired = True
        waiters = [waiter for waiter in self._queue if waiter.adapter is adapter]
        holders = [instance for instance, leases in self._leases.items() if adapter_id in leases]
        for waiter in waiters:
            self._end_wait(waiter)
        for instance in holders:
            self._end_lease(instance, adapter_id, now_s)
        if self._adapters.get(adapter_id) is adapter:
            self._settle(adapter)
        self._promise()
        return {*holders, *(waiter.instance for waiter in waiters)}

    def grant_due(self, now_s: float) -> None:
        if self.is_due:
            self.grant_waiting(now_s)

    def grant_waiting(self, now_s: float) -> None:
        while self._residency.is_over and self._residency.evict_idle(self._stand(now_s)):
            pass
        found = set() if self._residency.is_over else {waiter.adapter for waiter in self._queue}
        # Leases only grow here: an adapter without possible room needs no second look.
        while found := {one for one in found if one.num_waiting and self._residency.could_have_room(one)}:
            if not self._grant_first(found, now_s):
                break
        self._portions = self._shares.portions(now_s)
        self.is_due = self._is_promised = False

    def resize(self, capacity: int) -> None:
        """Change the number of residents; `grant_due` evicts.  Raises ConfigError below 1."""
        if capacity < 1:
            raise ConfigError(
                f"lora_server.capacity={capacity} leaves no place for an adapter; choose 1 or more"
            )
        self._residency.resize(capacity)
        self._promise()

    def max_capacity(self) -> int | None:
        """`ServerPages.num_fitting` of registered adapters, or None."""
        known = [adapter.shard_pages for adapter in self._adapters.values() if not adapter.retired]
        return self._residency.pages.num_fitting(known) if known else None

    def residents(self) -> Iterable[ServedAdapter]:
        """Resident adapters, read-only."""
        return self._residency.adapters.values()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def stats(self) -> LeaseStats:
        """Counts, and bytes of whole pages."""
        found = self._residency
        return LeaseStats(
            num_resident=len(found.adapters),
            num_leases=sum(len(leases) for leases in self._leases.values()),
            num_waiting=len(self._queue),
            num_loads=found.num_loads,
            num_evictions=found.num_evictions,
            resident_bytes=sum(one.num_pages for one in self.residents()) * self._page_bytes,
            loaded_bytes=found.num_pages_loaded * self._page_bytes,
        )

    def _wait_for(self, waiter: Waiter, tenant: int, now_s: float) -> None:
        standing, other = self._stand(now_s), replace(waiter, tenant=tenant)
        if standing is not None and other.turn(standing) < waiter.turn(standing):
            self._queue.put(other)
            self._promise()

    def _registered(self, adapter_id: str) -> ServedAdapter:
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.retired:
            raise AdapterNotFoundError(f"adapter {adapter_id!r} is not registered with the LoRA Server")
        return adapter

    def _grant_youngest(self, waiter: Waiter, now_s: float) -> Grant | None:
        if not self._residency.could_have_room(waiter.adapter):
            return None
        standing = self._stand(now_s)
        if self._queue.stops(waiter, standing, now_s) or not self._bring_in(waiter, standing):
            return None
        changes_nothing = waiter.takes_nothing and waiter.adapter.owner == waiter.tenant
        lease = self._grant(waiter, now_s)
        if standing is not None and self._queue and not changes_nothing:
            self.is_due = True  # holdings and turns have changed
        return lease

    def _grant_first(self, among: set[ServedAdapter], now_s: float) -> bool:
        standing = self._stand(now_s)

        def can_be_resident(waiter: Waiter) -> bool:
            return waiter.adapter in among and self._bring_in(waiter, standing)

        for waiter in self._queue.admissible(can_be_resident, standing, now_s):
            self._grant(waiter, now_s)
            if standing is not None:
                return True
        return False

    def _grant(self, waiter: Waiter, now_s: float) -> Grant:
        adapter = waiter.adapter
        assert adapter.slot is not None
        lease = Grant(waiter.instance, adapter.adapter_id, adapter.slot, adapter.generation)
        self._residency.hold(adapter)
        adapter.last_used_s, adapter.owner = now_s, waiter.tenant
        self._leases.setdefault(waiter.instance, {})[adapter.adapter_id] = lease
        self._end_wait(waiter)
        self._events.append(lease)
        return lease

    def _bring_in(self, waiter: Waiter, standing: Standing[ServedAdapter] | None) -> bool:
        return self._residency.bring_in(waiter.adapter, waiter.tenant, standing)

    def _end_wait(self, waiter: Waiter) -> None:
        self._queue.remove(waiter)
        self._settle(waiter.adapter)

    def _end_lease(self, instance: str, adapter_id: str, now_s: float) -> None:
        del self._leases[instance][adapter_id]
        adapter = self._adapters[adapter_id]
        self._residency.let_go(adapter)
        adapter.last_used_s = now_s
        if adapter.num_running == 0:  # else nothing falls free
            self._shares.stay((adapter.owner,), now_s)
            self._settle(adapter)
            self._promise()

    def _promise(self) -> None:
        if self._queue or self._residency.is_over:
            self.is_due = self._is_promised = True

    def _settle(self, adapter: ServedAdapter) -> None:
        if adapter.retired and adapter.num_running == 0 and adapter.num_waiting == 0:
            if adapter.slot is not None:
                self._residency.evict(adapter)
            del self._adapters[adapter.adapter_id]

    def _stand(self, now_s: float) -> Standing[ServedAdapter] | None:
        if self._shares.num_tenants < 2:
            return None
        residents = list(self.residents())
        users = {one.owner for one in residents if one.num_running}
        self._shares.stay(users | {waiter.tenant for waiter in self._queue}, now_s)
        if not self._shares.is_divided(now_s):
            return None
        return Standing(self._shares, residents, self._residency.totals, now_s)
