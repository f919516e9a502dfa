# SPDX-License-Identifier: Apache-2.0
"""Several tenants at one LoRA Server: what one asks for takes nothing that is within another's share."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.cache.leases.lease_queue import Standing
from moe_lora.cache.leases.leases import Event, Grant, LeaseTable
from moe_lora.cache.leases.residency import Evict, Load, ServedAdapter
from moe_lora.policies.caching.arena_shares import PRESENT_S, ArenaShares
from moe_lora.policies.caching.caching import BEYOND, NOBODY, WITHIN, Asker

CAPACITY, PAGES = 6, (9, 8)
SHARDS = ({}, {0: {0: 1}}, {0: {0: 2}, 1: {0: 1}}, {1: {0: 2, 1: 2}})
ROOMS = ((1, 0, 0), (1, 1, 0), (1, 2, 1), (1, 0, 4))


class Tenants:
    """A lease table, and by its events who holds what; each load is held against what tenants are due.

    What is called is heard together until `end_turn`, when those that wait are looked at.
    """

    def __init__(self, weights: tuple[float, ...]) -> None:
        self.askers = [Asker(f"tenant {number}", weight) for number, weight in enumerate(weights)]
        self.table = LeaseTable(CAPACITY, PAGES, 1, starvation_s=3.0)
        self.now_s = 0.0
        self.present: set[int] = set()
        self.owner: dict[str, int] = {}
        self.room: dict[str, tuple[int, ...]] = {}
        self.resident: set[str] = set()
        self.leases: dict[tuple[str, str], int] = {}
        self.waiting: dict[tuple[str, str], int] = {}
        self.is_owed = False
        """Whether in this turn an adapter was used no longer, while somebody waited."""

    def acquire(self, tenant: int, instance: str, adapter: int) -> None:
        adapter_id = f"adapter {adapter}"
        instance += str(tenant)  # of two tenants of one instance events don't say whose turn counted
        self.table.register(adapter_id, SHARDS[adapter % 4])
        self.room[adapter_id] = ROOMS[adapter % 4]
        num_leases = len(self.leases)
        if (instance, adapter_id) not in self.leases:
            self.present.add(tenant)
            self.waiting.setdefault((instance, adapter_id), tenant)
        self.table.acquire(instance, adapter_id, self.now_s, self.askers[tenant])
        self.carry_out()
        assert not self.is_owed or len(self.leases) == num_leases, "it is theirs who wait"

    def release(self, number: int) -> None:
        if self.leases:
            key = sorted(self.leases)[number % len(self.leases)]
            del self.leases[key]
            self.is_owed |= bool(self.waiting) and key[1] not in {one for _, one in self.leases}
            self.table.release(*key, self.now_s)
            self.carry_out()

    def end_turn(self) -> None:
        self.table.grant_due(self.now_s)
        self.carry_out()
        self.is_owed = False

    def carry_out(self) -> None:
        left: list[str] = []
        loaded = None
        for event in self.table.take_events():
            if isinstance(event, Evict):
                left.append(event.adapter_id)
            elif isinstance(event, Load):
                loaded = event.adapter_id
            else:
                tenant = self.waiting.pop((event.instance, event.adapter_id))
                if loaded is not None:
                    self.check(left, loaded, tenant)
                    self.resident = self.resident - set(left) | {loaded}
                left, loaded = [], None
                self.owner[event.adapter_id] = tenant
                self.leases[event.instance, event.adapter_id] = tenant
        assert not left

    def beyond(self, tenant: int, resident: set[str], entering: tuple[int, ...] = (0, 0, 0)) -> set[int]:
        """Kinds of room (places, pages of each rank) of which it has more than its share, of those asked."""
        weights = {one: self.askers[one].share for one in self.present}
        part = weights.get(tenant, 0.0) / sum(weights.values())
        held = [sum(self.room[one][k] for one in resident if self.owner[one] == tenant) for k in range(3)]
        asked = [k for k in range(3) if entering[k] or not any(entering)]
        totals = CAPACITY, *PAGES
        return {k for k in asked if held[k] + entering[k] > part * totals[k] * (1 + 1e-6) + 1e-6}

    def check(self, left: list[str], loaded: str, tenant: int) -> None:
        leased = {adapter_id for _, adapter_id in self.leases}
        stays_within = not self.beyond(tenant, self.resident, self.room[loaded])
        uses = any(self.owner[one] == tenant for one in leased)
        now = set(self.resident)
        for adapter_id in left:
            owner = self.owner[adapter_id]
            if owner != tenant and not self.beyond(owner, self.resident):
                assert stays_within or not uses
                for one in now - leased:
                    kinds = self.beyond(self.owner[one], now)
                    assert self.owner[one] == tenant or not any(self.room[one][k] for k in kinds)
            now.remove(adapter_id)


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(0, 2), st.sampled_from("ij"), st.integers(0, 15)),
        st.tuples(st.just("release"), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=5,
)
TURNS = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.5, 4.0]), CALLS), min_size=12, max_size=25)


@settings(max_examples=40, deadline=None)
@given(weights=st.tuples(*[st.sampled_from([0.5, 1.0, 1.0, 3.0])] * 3), turns=TURNS)
def test_what_is_within_a_share_leaves_only_for_what_is_within_one_or_a_tenants_only_adapter(weights, turns):
    """As `Standing` says, whatever is asked, held and released; and all that was asked for comes."""
    tenants = Tenants(weights)
    for after_s, calls in turns:
        tenants.now_s += after_s
        for name, *args in calls:
            getattr(tenants, name)(*args)
        tenants.end_turn()
    while tenants.waiting:
        num_waiting = len(tenants.waiting)
        while tenants.leases and len(tenants.waiting) == num_waiting:
            tenants.release(0)
            tenants.end_turn()
        assert len(tenants.waiting) < num_waiting


def table_of(capacity: int, *adapters: str) -> LeaseTable:
    table = LeaseTable(capacity, (100,), 1, starvation_s=5.0)
    for adapter_id in adapters:
        table.register(adapter_id, {0: {0: 1}})
    return table


def leases_of(events: list[Event]) -> list[tuple[str, str]]:
    """(instance, adapter) of the grants among these."""
    return [(event.instance, event.adapter_id) for event in events if isinstance(event, Grant)]


def granted(table: LeaseTable) -> list[str]:
    """The adapters of the grants among the events not yet taken."""
    return [adapter_id for _, adapter_id in leases_of(table.take_events())]


def resident(table: LeaseTable) -> set[str]:
    return {adapter.adapter_id for adapter in table.residents()}


GREEDY, MODEST = Asker("greedy"), Asker("modest")
COLD = [f"cold {number}" for number in range(1000)]


@pytest.mark.parametrize(("at_once", "num_cold"), [(1, 200), (20, 1000)])
def test_a_thousand_cold_adapters_of_one_tenant_leave_anothers_where_they_are(at_once, num_cold):
    own = {"a", "b", "c"}
    table = table_of(8, *sorted(own), *COLD)
    for adapter_id in own:
        table.acquire("i", adapter_id, 0.0, MODEST)
        table.release("i", adapter_id, 0.0)
    num_granted = Counter[str]()
    held: list[str] = []
    for number, adapter_id in enumerate(COLD[:num_cold]):
        table.acquire("j", adapter_id, number / 10, GREEDY)
        for event in table.take_events():
            if isinstance(event, Grant):
                num_granted[event.instance] += 1
                held.append(event.adapter_id)
        if number >= at_once and held:
            table.release("j", held.pop(0), number / 10)
            table.grant_due(number / 10)
        assert own <= resident(table)
    assert num_granted["j"] > 0.9 * num_cold


def test_without_tenants_they_flush_it():
    table = table_of(8, "a", *COLD[:8])
    for adapter_id in ("a", *COLD[:8]):
        table.acquire("i", adapter_id, 0.0)
        table.release("i", adapter_id, 0.0)
    assert "a" not in resident(table)


def test_a_place_that_falls_free_is_first_of_who_has_less_than_its_share():
    table = table_of(2, "a", "b", *COLD)
    for adapter_id in COLD[:20]:
        table.acquire("j", adapter_id, 0.0, GREEDY)
    assert table.acquire("i", "a", 9.0, MODEST) is None  # those before it have starved
    assert table.acquire("i", "b", 9.0, MODEST) is None
    table.take_events()
    for number in range(2):
        table.release("j", COLD[number], 10.0 + number)
        table.grant_due(10.0 + number)
    assert granted(table) == ["a", COLD[2]]


def test_a_share_smaller_than_an_adapter_shuts_nobody_out():
    table = table_of(2, "a", "b", "c")
    rich = Asker("rich", 100.0)
    for adapter_id in "ab":
        table.acquire("i", adapter_id, 0.0, rich)
        table.release("i", adapter_id, 0.0)
    assert table.acquire("i", "c", 1.0, MODEST) is not None


def test_who_asked_for_nothing_for_long_has_no_share_but_for_what_it_uses():
    table = table_of(4, "a", "b", "c", "d", "e", "f")
    for adapter_id in "abc":
        table.acquire("i", adapter_id, 0.0, MODEST)
    for adapter_id in "bc":
        table.release("i", adapter_id, 1.0)
    later_s = PRESENT_S + 10
    for adapter_id in "def":
        table.acquire("j", adapter_id, later_s, GREEDY)
    assert resident(table) == {"a", "c", "d", "e"} or resident(table) == {"a", "b", "d", "e"}
    table.release("i", "a", later_s)
    table.release("j", "d", later_s + 2 * PRESENT_S)
    table.grant_due(later_s + 2 * PRESENT_S)
    table.acquire("j", "f", later_s + 2 * PRESENT_S, GREEDY)
    assert {"e", "f"} <= resident(table)


def test_of_two_tenants_of_an_instance_that_need_an_adapter_the_earlier_turn_counts():
    table = table_of(2, "a", "b", "c", "shared")
    for adapter_id in ("a", "b", "c", "shared"):
        table.acquire("j", adapter_id, 0.0, GREEDY)
    assert table.acquire("j", "shared", 1.0, MODEST) is None
    assert table.acquire("j", "shared", 1.0, GREEDY) is None
    table.take_events()
    table.release("j", "a", 2.0)
    table.grant_due(2.0)
    assert granted(table) == ["shared"]


def greedy_waits_for_what_modest_left_idle(table: LeaseTable) -> None:
    for adapter_id in "ab":
        table.acquire("i", adapter_id, 0.0, MODEST)
        table.release("i", adapter_id, 0.0)
    for adapter_id in "cde":
        table.acquire("j", adapter_id, 1.0, GREEDY)
    assert resident(table) == {"a", "b", "c", "d"}
    table.take_events()


def test_what_an_absent_tenant_left_is_given_to_those_that_wait_when_another_asks():
    table = table_of(4, "a", "b", "c", "d", "e", "f")
    greedy_waits_for_what_modest_left_idle(table)
    assert table.acquire("j", "f", PRESENT_S + 2, GREEDY) is None, "e came first"
    assert table.is_due
    table.grant_due(PRESENT_S + 2)
    assert granted(table) == ["e", "f"]


def test_time_alone_gives_what_an_absent_tenant_left():
    table = table_of(4, "a", "b", "c", "d", "e")
    greedy_waits_for_what_modest_left_idle(table)
    table.grant_waiting(PRESENT_S - 1)
    assert not table.take_events()
    table.grant_waiting(PRESENT_S + 2)
    assert "e" in resident(table)


@pytest.mark.parametrize("seed", range(15))
def test_who_can_have_a_lease_gets_it_with_what_made_it_free_for_it(seed):
    """Another look right after a turn finds nobody: a lease given at once changes older ones' turns, too."""
    rng = random.Random(seed)
    askers = [Asker(str(number), rng.choice([0.5, 1.0, 3.0])) for number in range(3)]
    table, held, now_s = LeaseTable(CAPACITY, PAGES, 1, starvation_s=3.0), [], 0.0
    for adapter in range(16):
        table.register(str(adapter), SHARDS[adapter % 4])
    for _ in range(60):
        now_s += rng.choice([0.0, 0.0, 0.0, 0.0, 1.0, 4.0])
        for _ in range(rng.choice([1, 1, 2, 5])):
            if held and rng.random() < 0.4:
                table.release(*held.pop(rng.randrange(len(held))), now_s)
            else:
                table.acquire(rng.choice("ij"), str(rng.randrange(16)), now_s, rng.choice(askers))
            held += leases_of(table.take_events())
        table.grant_due(now_s)
        held += leases_of(table.take_events())
        table.grant_waiting(now_s)
        assert not table.take_events()


def test_what_is_in_use_already_is_granted_though_another_tenant_starves():
    table = table_of(2, "a", "b", "c")
    table.acquire("i", "a", 0.0, GREEDY)
    table.acquire("i", "b", 0.0, GREEDY)
    assert table.acquire("i", "c", 0.0, MODEST) is None
    assert table.acquire("j", "a", 9.0, GREEDY) is not None


@pytest.mark.parametrize("seed", range(20))
def test_one_order_of_what_is_idle_serves_every_tenant_that_asks(seed, monkeypatch):
    """As if the order were made for each of them, and made once but for those with idle adapters."""
    rng = np.random.default_rng(seed)
    shares, num_tenants, num_kinds = ArenaShares(), 20, 3
    numbers = [shares.ask(str(name), float(rng.choice([1.0, 5.0])), 0.0) for name in range(num_tenants)]
    residents = [
        ServedAdapter(
            uid, str(uid), {}, (1, *map(int, rng.integers(0, 4, num_kinds - 1))), owner, last_used_s=uid
        )
        for uid, owner in enumerate(map(int, rng.choice([NOBODY, *numbers[:6]], 24)))
    ]
    for one in residents:
        one.num_running = int(rng.integers(0, 2))
    totals = (24.0, 30.0, 30.0)
    standing = Standing(shares, residents, totals, 0.0)
    orders = []
    order = shares.eviction_order
    monkeypatch.setattr(shares, "eviction_order", lambda *args: orders.append(0) or order(*args))
    room = (1, 2, 0)
    leaving = {tenant: standing.may_leave(tenant, room) for tenant in numbers}
    idle_owners = {one.owner for one in residents if not one.num_running}
    assert len(orders) <= num_kinds * (1 + len(idle_owners))
    for tenant in numbers:
        assert leaving[tenant] == leaving_of(shares, residents, totals, tenant, room)


def leaving_of(shares, residents, totals, tenant, room) -> list[ServedAdapter]:
    """What `Standing` says, with the orders of this tenant's own."""
    shares.make_room_for(tenant, 0.0)
    idle = [one for one in residents if not one.num_running]
    orders = dict.fromkeys(idle, WITHIN)
    is_beyond = False
    for kind, total in enumerate(totals):
        owners = np.array([one.owner for one in residents])
        held = shares.held(owners, np.array([one.room[kind] for one in residents]))
        there = [one for one in idle if one.room[kind]]
        values = np.array([one.last_used_s for one in there], float)
        amounts = np.array([one.room[kind] for one in there], int)
        found = shares.eviction_order(
            held, np.array([one.owner for one in there], int), amounts, values, total, 0.0
        )
        orders.update({one: min(orders[one], order) for one, order in zip(there, found, strict=True)})
        part = shares.portions(0.0)[tenant] * total
        is_beyond |= bool(room[kind] and held[tenant] + room[kind] > part * (1 + 1e-9))
    if is_beyond and any(one.owner == tenant and one.num_running for one in residents):
        idle = [one for one in idle if one.owner == tenant or orders[one] == BEYOND]
    return sorted(idle, key=lambda one: (orders[one], one.last_used_s))


def test_those_that_could_have_no_place_are_not_weighed(monkeypatch):
    table = table_of(4, *COLD[:60])
    for adapter_id in COLD[:4]:
        table.acquire("i", adapter_id, 0.0, GREEDY)
    monkeypatch.setattr(Standing, "__init__", lambda *args: pytest.fail("all places are in use"))
    for number, adapter_id in enumerate(COLD[4:60]):
        assert table.acquire("i", adapter_id, 0.0, Asker(f"tenant {number}")) is None
    table.grant_waiting(1.0)


def test_a_burst_of_what_is_in_use_is_given_at_once_and_those_that_wait_are_looked_at_once_if_at_all(
    monkeypatch,
):
    """Not if all stays its tenants' own.  Those that wait, beyond their shares, may not have the idle
    adapter of a third tenant."""
    table, tried = table_of(16, "idle", *COLD[:60]), []
    askers = [GREEDY, Asker("other")] * 30
    table.acquire("i", "idle", 0.0, MODEST)
    table.release("i", "idle", 0.0)
    for adapter_id, asker in zip(COLD[:55], askers, strict=False):
        table.acquire("i", adapter_id, 0.0, asker)
    table.grant_due(0.0)
    assert (table.num_waiting, table.is_due) == (40, False)
    bring_in = table._bring_in
    monkeypatch.setattr(table, "_bring_in", lambda *args: tried.append(args[0]) or bring_in(*args))
    for adapter_id, asker in zip(COLD[:15], askers, strict=False):
        assert table.acquire("j", adapter_id, 0.0, asker) is not None
    assert (table.is_due, len(tried)) == (False, 15)
    for adapter_id, asker in zip(COLD[:15], askers[1:], strict=False):
        assert table.acquire("k", adapter_id, 0.0, asker) is not None
    assert (table.is_due, len(tried)) == (True, 30)
    table.grant_due(0.0)
    assert (table.num_waiting, table.is_due, len(tried)) == (40, False, 30 + 40)
