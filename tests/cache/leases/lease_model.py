# SPDX-License-Identifier: Apache-2.0
"""A server that carries out the events of a lease table, and what must hold after every call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from moe_lora.cache.leases.leases import Grant, LeaseTable
from moe_lora.cache.leases.residency import Evict, Load
from moe_lora.core.errors import AdapterNotFoundError

PAGES_PER_RANK = (7, 6)
STARVATION_S = 2.0
SHARDS: Mapping[str, Mapping[int, Mapping[int, int]]] = {
    "tiny": {0: {0: 1}},
    "one": {0: {0: 1, 1: 1}, 1: {0: 1, 1: 1}},
    "two": {0: {0: 2, 1: 1}, 1: {0: 1, 1: 2}},
    "left": {0: {0: 3}, 1: {}},
    "right": {1: {0: 2, 1: 2}},
    "whole": {0: {0: 7}, 1: {0: 3, 1: 3}},
    "nothing": {},
}
INSTANCES = ("i", "j", "k", "l")


class LeaseModel:
    """Calls a table, replays its events, and checks that both agree."""

    def __init__(
        self,
        capacity: int,
        pages_per_rank: Sequence[int] = PAGES_PER_RANK,
        shards: Mapping[str, Mapping[int, Mapping[int, int]]] = SHARDS,
    ) -> None:
        self.pages_per_rank = tuple(pages_per_rank)
        self.shards = shards
        self.table = LeaseTable(capacity, pages_per_rank, 1000, starvation_s=STARVATION_S)
        self.capacity = capacity
        self.now_s = 0.0
        self.registered: set[str] = set()
        self.slots: dict[int, Load] = {}
        self.generations: dict[int, int] = {}
        self.owned: set[tuple[int, int]] = set()
        self.leases: dict[tuple[str, str], Grant] = {}
        self.waiting: dict[tuple[str, str], float] = {}
        self.num_starving = 0
        """Turns that ended with a starving waiter."""
        self._is_turn = False

    # Calls

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is called within it is heard together: those that wait are looked at once, at its end."""
        self._is_turn = True
        yield
        self._is_turn = False
        self.settle()

    def register(self, adapter_id: str) -> None:
        self.table.register(adapter_id, self.shards[adapter_id])
        self.registered.add(adapter_id)
        self.settle()

    def unregister(self, adapter_id: str) -> None:
        if adapter_id not in self.registered:
            with pytest.raises(AdapterNotFoundError):
                self.table.unregister(adapter_id)
        else:
            self.table.unregister(adapter_id)
            self.registered.remove(adapter_id)
        self.settle()

    def acquire(self, instance: str, adapter_id: str) -> None:
        key = (instance, adapter_id)
        if adapter_id not in self.registered and key not in self.leases and key not in self.waiting:
            with pytest.raises(AdapterNotFoundError):
                self.table.acquire(instance, adapter_id, self.now_s)
        else:
            before = self.leases.get(key)
            is_owed = self.table.is_due and bool(self.waiting)
            if before is None:
                self.waiting.setdefault(key, self.now_s)
            lease = self.table.acquire(instance, adapter_id, self.now_s)
            assert lease == before or not is_owed, "what is due is theirs who wait"
            self.settle()
            assert lease == self.leases.get(key)
            assert before in (None, lease)

    def release(self, instance: str, adapter_id: str) -> None:
        held = self.leases.pop((instance, adapter_id), None) is not None
        assert self.table.release(instance, adapter_id, self.now_s) == held
        self.settle()

    def cancel(self, instance: str, adapter_id: str) -> None:
        waited = self.waiting.pop((instance, adapter_id), None) is not None
        assert self.table.cancel(instance, adapter_id) == waited
        self.settle()

    def prefetch(self, adapter_id: str) -> None:
        if adapter_id in self.registered:
            could = self.could_be_resident(adapter_id) and len(self.slots) <= self.capacity
            assert self.table.prefetch(adapter_id, self.now_s) == could
            self.settle()
            assert could <= (adapter_id in {load.adapter_id for load in self.slots.values()})

    def drop_instance(self, instance: str) -> None:
        for kept in (self.leases, self.waiting):
            for key in [key for key in kept if key[0] == instance]:
                del kept[key]
        self.table.drop_instance(instance, self.now_s)
        self.settle()

    def fail(self, adapter_id: str) -> None:
        """Its leases and waits end at once, whoever has them; nothing of it stays resident."""
        concerned = {key[0] for key in (*self.leases, *self.waiting) if key[1] == adapter_id}
        for kept in (self.leases, self.waiting):
            for key in [key for key in kept if key[1] == adapter_id]:
                del kept[key]
        assert self.table.fail(adapter_id, self.now_s) == concerned
        self.registered.discard(adapter_id)
        self.settle()
        assert adapter_id not in {load.adapter_id for load in self.slots.values()}

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.table.resize(capacity)
        self.settle()

    # Replay and checks

    def settle(self) -> None:
        """Carry out the events of the last call; at the end of a turn those of what is due, then compare."""
        self._carry_out()
        if not self._is_turn:
            self.table.grant_due(self.now_s)
            self._carry_out()
            self.num_starving += any(map(self.starves, self.waiting))
            self.check()

    def _carry_out(self) -> None:
        order = list(self.waiting)
        granted = []
        for event in self.table.take_events():
            if isinstance(event, Load):
                self._load(event)
            elif isinstance(event, Evict):
                self._evict(event)
            else:
                self._grant(event)
                granted.append(order.index((event.instance, event.adapter_id)))
        assert granted == sorted(granted), "older waiters come first, whichever their instance"
        passed_over = [key for key in order[: max(granted, default=0)] if key in self.waiting]
        assert not any(map(self.starves, passed_over)), "a starving waiter stops younger ones"

    def _load(self, load: Load) -> None:
        assert load.slot not in self.slots
        assert load.generation > self.generations.get(load.slot, 0)
        shards = self.shards[load.adapter_id]
        taken = {r: {la: count for la, (_, count) in runs.items()} for r, runs in load.runs.items()}
        assert taken == {r: layers for r, layers in shards.items() if layers}
        pages = self._pages_of(load)
        assert len(pages) == sum(sum(layers.values()) for layers in shards.values())
        assert all(0 <= page < self.pages_per_rank[r] for r, page in pages)
        assert not pages & self.owned, "a page has one owner"
        self.owned |= pages
        self.slots[load.slot] = load
        self.generations[load.slot] = load.generation

    def _evict(self, evict: Evict) -> None:
        load = self.slots.pop(evict.slot)
        assert (load.adapter_id, load.generation) == (evict.adapter_id, evict.generation)
        assert evict.adapter_id not in self.leased, "a leased adapter stays"
        self.owned -= self._pages_of(load)

    def _grant(self, grant: Grant) -> None:
        load = self.slots[grant.slot]
        assert (load.adapter_id, load.generation) == (grant.adapter_id, grant.generation)
        assert len(self.slots) <= self.capacity, "no grants until enough have left"
        key = (grant.instance, grant.adapter_id)
        del self.waiting[key]
        assert key not in self.leases
        self.leases[key] = grant

    def check(self) -> None:
        residents = {r.slot: (r.adapter_id, r.generation, r.runs) for r in self.table.residents()}
        assert residents == {
            s: (load.adapter_id, load.generation, load.runs) for s, load in self.slots.items()
        }
        stats = self.table.stats()
        assert stats.num_resident == len(self.slots) == stats.num_loads - stats.num_evictions
        assert stats.num_leases == len(self.leases)
        assert stats.num_waiting == len(self.waiting)
        assert stats.resident_bytes == 1000 * len(self.owned)
        names = [load.adapter_id for load in self.slots.values()]
        assert len(names) == len(set(names))
        assert len(names) <= self.capacity or set(names) <= self.leased
        if len(names) <= self.capacity:
            self._check_no_waiter_is_kept_waiting()

    def _check_no_waiter_is_kept_waiting(self) -> None:
        for key in self.waiting:
            assert not self.could_be_resident(key[1])
            if self.starves(key):
                return

    def starves(self, key: tuple[str, str]) -> bool:
        return self.now_s - self.waiting[key] > STARVATION_S

    @property
    def leased(self) -> set[str]:
        return {adapter_id for _, adapter_id in self.leases}

    def could_be_resident(self, adapter_id: str) -> bool:
        """Whether it is, or would be first fit were all idle ones gone; page by page."""
        if any(load.adapter_id == adapter_id for load in self.slots.values()):
            return True
        pinned = [load for load in self.slots.values() if load.adapter_id in self.leased]
        taken = set().union(*(self._pages_of(load) for load in pinned))
        for r, layers in self.shards[adapter_id].items():
            for count in layers.values():
                spots = [
                    {(r, first + n) for n in range(count)}
                    for first in range(self.pages_per_rank[r] - count + 1)
                ]
                spot = next((pages for pages in spots if not pages & taken), None)
                if spot is None:
                    return False
                taken |= spot
        return len(pinned) < self.capacity

    def _pages_of(self, load: Load) -> set[tuple[int, int]]:
        return {
            (r, first + n)
            for r, runs in load.runs.items()
            for first, count in runs.values()
            for n in range(count)
        }

    # The end

    def drain(self) -> None:
        """Once those that hold leases release them, each waiter gets its own; then nothing is left over."""
        while self.waiting:
            num_waiting = len(self.waiting)
            for instance, adapter_id in list(self.leases):
                self.release(instance, adapter_id)
            assert len(self.waiting) < num_waiting
        for instance in INSTANCES:
            self.drop_instance(instance)
        for adapter_id in list(self.registered):
            self.unregister(adapter_id)
        assert not self.slots
        assert not self.owned
        table, residency = self.table, self.table._residency
        assert residency.pages.num_free == self.pages_per_rank
        assert (list(table._queue), table._leases, table._adapters) == ([], {}, {})
        assert sorted(residency._free_slots) == list(range(len(residency._generations)))
