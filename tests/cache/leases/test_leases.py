# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from moe_lora.cache.leases.leases import Event, Grant, LeaseTable
from moe_lora.cache.leases.residency import Evict, Load
from moe_lora.core.errors import AdapterNotFoundError, ConfigError

ONE_PAGE = {0: {0: 1}}


def make_table(capacity: int = 2, pages=(8,), adapters: str = "abcd", shard=ONE_PAGE) -> LeaseTable:
    """One rank with a page a adapter, unless told: only slots are scarce."""
    table = LeaseTable(capacity, pages, 1000, starvation_s=5.0)
    for adapter_id in adapters:
        table.register(adapter_id, shard)
    return table


def decided(table: LeaseTable, now_s: float) -> list[Event]:
    """The events not yet taken, with those of what is due."""
    table.grant_due(now_s)
    return table.take_events()


def granted(table: LeaseTable, now_s: float) -> list[tuple[str, str]]:
    """(instance, adapter) of the grants among these."""
    return [(e.instance, e.adapter_id) for e in decided(table, now_s) if isinstance(e, Grant)]


def resident(table: LeaseTable) -> set[str]:
    return {adapter.adapter_id for adapter in table.residents()}


def test_first_acquire_loads_and_grants():
    table = make_table(adapters="", pages=(8, 8))
    table.register("a", {0: {0: 2, 2: 1}, 1: {1: 3, 3: 0}})
    lease = table.acquire("i", "a", 0.0)
    assert lease == Grant("i", "a", slot=0, generation=1)
    assert table.take_events() == [Load("a", 0, 1, {0: {0: (0, 2), 2: (2, 1)}, 1: {1: (0, 3)}}), lease]
    assert table.take_events() == []


def test_instances_share_the_slot_of_an_adapter():
    table = make_table()
    first, second = table.acquire("i", "a", 0.0), table.acquire("j", "a", 1.0)
    assert (first.slot, first.generation) == (second.slot, second.generation)
    assert [type(event) for event in table.take_events()] == [Load, Grant, Grant]


def test_acquire_of_a_held_lease_gives_the_same_and_no_event():
    table = make_table()
    first = table.acquire("i", "a", 0.0)
    table.take_events()
    assert table.acquire("i", "a", 1.0) == first
    assert table.take_events() == []
    assert table.stats().num_leases == 1


def test_idle_adapter_makes_room_for_another_under_a_new_generation():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    table.release("i", "a", 1.0)
    assert resident(table) == {"a"}
    table.take_events()
    assert table.acquire("i", "b", 2.0) == Grant("i", "b", slot=0, generation=2)
    assert [type(event) for event in table.take_events()] == [Evict, Load, Grant]


def test_idle_adapter_is_granted_again_without_a_load():
    table = make_table()
    first = table.acquire("i", "a", 0.0)
    table.release("i", "a", 1.0)
    assert table.acquire("j", "a", 2.0).generation == first.generation
    assert table.stats().num_loads == 1


def test_least_recently_used_adapter_leaves():
    table = make_table()
    for adapter_id, now_s in (("a", 0.0), ("b", 1.0)):
        table.acquire("i", adapter_id, now_s)
    table.release("i", "b", 2.0)
    table.release("i", "a", 3.0)
    table.acquire("i", "c", 4.0)
    assert resident(table) == {"a", "c"}


def test_waiters_are_served_in_order_over_all_instances():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    for now_s, (instance, adapter_id) in enumerate([("j", "b"), ("i", "c"), ("k", "b"), ("j", "d")]):
        assert table.acquire(instance, adapter_id, 1.0 + now_s) is None
    table.take_events()
    table.release("i", "a", 5.0)
    assert granted(table, 5.0) == [("j", "b"), ("k", "b")]
    table.release("j", "b", 5.1)
    table.release("k", "b", 5.2)
    assert granted(table, 5.2) == [("i", "c")]
    table.release("i", "c", 5.3)
    assert granted(table, 5.3) == [("j", "d")]


def test_what_falls_free_is_given_out_when_it_is_said_so_and_an_acquire_meanwhile_waits_behind_the_older():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    table.release("i", "a", 1.0)
    assert not table.is_due, "nobody waits"
    table.acquire("i", "a", 1.0)
    table.acquire("j", "b", 1.0)
    assert not table.is_due
    table.take_events()
    table.release("i", "a", 2.0)
    assert table.acquire("k", "a", 2.0) is None, "it is there, but j came first"
    assert table.is_due
    assert table.take_events() == []
    assert granted(table, 2.0) == [("j", "b")]
    assert not table.is_due


def test_a_lease_given_back_of_what_another_instance_uses_frees_nothing():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    table.acquire("j", "a", 0.0)
    table.acquire("i", "b", 1.0)
    table.take_events()
    table.release("i", "a", 2.0)
    assert not table.is_due
    assert table.acquire("k", "a", 2.0) is not None, "as before that"
    table.take_events()
    table.release("j", "a", 3.0)
    table.release("k", "a", 3.0)
    assert granted(table, 3.0) == [("i", "b")]


def test_acquire_twice_keeps_the_first_place_in_the_queue():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    table.acquire("j", "b", 1.0)
    table.acquire("k", "c", 2.0)
    table.acquire("j", "b", 3.0)
    assert table.stats().num_waiting == 2
    table.take_events()
    table.release("i", "a", 4.0)
    assert granted(table, 4.0) == [("j", "b")]


def make_large_waiter() -> LeaseTable:
    """8 pages: a and b hold 3 each, "large" needs all and waits since 2.0, c and d need one."""
    table = make_table(capacity=4, adapters="cd")
    for adapter_id, num_pages in (("a", 3), ("b", 3), ("large", 8)):
        table.register(adapter_id, {0: {0: num_pages}})
    table.acquire("i", "a", 0.0)
    table.acquire("i", "b", 1.0)
    assert table.acquire("j", "large", 2.0) is None
    table.take_events()
    return table


def test_small_adapter_overtakes_a_large_one_for_a_while():
    table = make_large_waiter()
    assert table.acquire("k", "c", 6.9) is not None


def test_starving_large_adapter_stops_younger_ones_until_its_turn():
    table = make_large_waiter()
    assert table.acquire("k", "c", 7.1) is None
    assert table.acquire("k", "a", 7.2) is None, "a shared lease would keep a from draining"
    table.release("i", "a", 7.3)
    assert granted(table, 7.3) == []
    table.release("i", "b", 7.4)
    assert granted(table, 7.4) == [("j", "large")]
    table.release("j", "large", 7.5)
    assert granted(table, 7.5) == [("k", "c"), ("k", "a")]


def test_younger_ones_go_on_when_the_starving_one_cancels():
    table = make_large_waiter()
    table.acquire("k", "c", 7.1)
    assert table.cancel("j", "large")
    assert granted(table, 7.1) == [("k", "c")]


def test_nothing_is_evicted_for_an_adapter_that_would_not_fit_anyway():
    """Free 0-1, idle 2-3, leased 4-5, free 6-7: five pages are never in a row, so the idle one stays."""
    table = make_table(capacity=4, adapters="")
    for adapter_id in ("hole", "idle", "leased"):
        table.register(adapter_id, {0: {0: 2}})
        table.acquire("i", adapter_id, 0.0)
    table.release("i", "idle", 1.0)
    table.unregister("hole")
    table.release("i", "hole", 1.0)
    table.register("five", {0: {0: 5}})
    table.register("four", {0: {0: 4}})
    assert table.acquire("j", "five", 2.0) is None
    assert resident(table) == {"idle", "leased"}
    assert table.acquire("j", "four", 3.0) is not None
    assert resident(table) == {"four", "leased"}


def test_an_adapter_that_lacks_pages_on_one_rank_takes_none_on_others():
    table = make_table(capacity=4, pages=(4, 4), adapters="")
    table.register("a", {1: {0: 3}})
    table.register("both", {0: {0: 2}, 1: {0: 2}})
    table.register("left", {0: {0: 4}})
    table.acquire("i", "a", 0.0)
    assert table.acquire("i", "both", 1.0) is None
    assert table.acquire("i", "left", 2.0) is not None


def test_cancel_leaves_a_granted_lease_alone():
    table = make_table()
    table.acquire("i", "a", 0.0)
    assert not table.cancel("i", "a")
    assert table.stats().num_leases == 1


def test_release_of_a_lease_not_held_changes_nothing():
    table = make_table()
    table.acquire("i", "a", 0.0)
    assert not table.release("j", "a", 1.0)
    assert not table.release("i", "b", 1.0)
    assert table.stats().num_leases == 1


def test_dropped_instance_frees_what_it_held_and_waits_no_more():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    table.acquire("i", "c", 0.5)
    table.acquire("j", "b", 1.0)
    table.take_events()
    table.drop_instance("i", 2.0)
    assert granted(table, 2.0) == [("j", "b")]
    assert not table.release("i", "a", 3.0)
    assert table.stats().num_waiting == 0


def test_unregistered_adapter_serves_those_who_came_before():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    table.acquire("j", "b", 1.0)
    table.unregister("a")
    table.unregister("b")
    with pytest.raises(AdapterNotFoundError, match="'a' is not registered"):
        table.acquire("k", "a", 3.0)
    table.take_events()
    table.release("i", "a", 4.0)
    assert [type(event) for event in decided(table, 4.0)] == [Evict, Load, Grant]
    table.release("j", "b", 5.0)
    assert table.take_events() == [Evict("b", 0, 2)]
    assert resident(table) == set()


def test_unregistered_idle_adapter_leaves_at_once():
    table = make_table()
    table.acquire("i", "a", 0.0)
    table.release("i", "a", 1.0)
    table.take_events()
    table.unregister("a")
    assert table.take_events() == [Evict("a", 0, 1)]


def test_adapter_registered_again_while_held_goes_on_being_served():
    table = make_table()
    first = table.acquire("i", "a", 0.0)
    table.unregister("a")
    table.register("a", ONE_PAGE)
    assert table.acquire("j", "a", 2.0).generation == first.generation
    table.release("i", "a", 3.0)
    table.release("j", "a", 3.0)
    assert resident(table) == {"a"}


def test_id_with_other_shards_is_refused():
    table = make_table()
    with pytest.raises(ValueError, match="'a' is known with other shard sizes"):
        table.register("a", {0: {0: 2}})


@pytest.mark.parametrize(
    ("call", "args"), [("acquire", ("i", "x", 0.0)), ("prefetch", ("x", 0.0)), ("unregister", ("x",))]
)
def test_unknown_adapter_is_refused(call, args):
    table = make_table()
    with pytest.raises(AdapterNotFoundError, match="'x' is not registered with the LoRA Server"):
        getattr(table, call)(*args)


def test_prefetch_loads_without_a_lease():
    table = make_table(capacity=1)
    assert table.prefetch("a", 0.0)
    assert [type(event) for event in table.take_events()] == [Load]
    assert table.prefetch("b", 1.0), "an idle adapter may leave"
    table.acquire("i", "b", 2.0)
    assert not table.prefetch("a", 3.0), "a leased one may not"
    assert resident(table) == {"b"}


def test_prefetched_adapter_counts_as_just_used():
    table = make_table()
    table.acquire("i", "a", 0.0)
    table.release("i", "a", 1.0)
    table.prefetch("b", 2.0)
    table.acquire("i", "c", 3.0)
    assert resident(table) == {"b", "c"}


def test_growing_serves_those_who_wait():
    table = make_table(capacity=1)
    table.acquire("i", "a", 0.0)
    table.acquire("i", "b", 1.0)
    table.take_events()
    table.resize(2)
    assert granted(table, 1.0) == [("i", "b")]


def test_shrinking_evicts_the_idle_and_stops_grants_until_enough_left():
    table = make_table(capacity=4)
    for now_s, adapter_id in enumerate("abcd"):
        table.acquire("i", adapter_id, float(now_s))
    table.release("i", "a", 4.0)
    table.take_events()
    table.resize(1)
    assert decided(table, 4.0) == [Evict("a", 0, 1)]
    assert table.acquire("j", "b", 5.0) is None, "three are still resident"
    assert not table.prefetch("b", 5.0)
    table.release("i", "d", 6.0)
    assert decided(table, 6.0) == [Evict("d", 3, 1)]
    table.release("i", "c", 6.0)
    assert decided(table, 6.0) == [Evict("c", 2, 1), Grant("j", "b", 1, 1)]


def test_generation_goes_on_after_shrinking_and_growing():
    table = make_table(capacity=2)
    table.acquire("i", "a", 0.0)
    table.acquire("i", "b", 0.0)
    table.drop_instance("i", 1.0)
    table.resize(1)
    table.resize(2)
    assert table.acquire("i", "c", 4.0) == Grant("i", "c", slot=0, generation=2)
    assert table.acquire("i", "d", 5.0) == Grant("i", "d", slot=1, generation=2)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one_is_refused(capacity):
    with pytest.raises(ConfigError, match=f"lora_server.capacity={capacity} .*; choose 1 or more"):
        make_table(capacity)
    table = make_table()
    with pytest.raises(ConfigError, match="choose 1 or more"):
        table.resize(capacity)
    assert table.acquire("i", "a", 0.0) is not None


def test_adapter_larger_than_an_arena_is_refused_with_the_least_memory_that_works():
    table = LeaseTable(1, [8, 1000], 2_000_000, starvation_s=5.0)
    message = r"takes 0.018000 GB on rank 0 of the LoRA Server, .* 0.018018 or more"
    with pytest.raises(ConfigError, match=message):
        table.register("a", {0: {0: 5, 1: 4}, 1: {0: 9}})
    table = LeaseTable(1, [9, 1000], 2_000_000, starvation_s=5.0)
    table.register("a", {0: {0: 5, 1: 4}, 1: {0: 9}})
    assert table.acquire("i", "a", 0.0) is not None


def test_stats_count_whole_pages():
    table = make_table(capacity=1, adapters="a")
    table.register("b", {0: {0: 2, 1: 3}})
    table.acquire("i", "a", 0.0)
    table.acquire("j", "b", 1.0)
    stats = table.stats()
    assert (stats.num_resident, stats.num_leases, stats.num_waiting) == (1, 1, 1)
    assert (stats.num_loads, stats.num_evictions) == (1, 0)
    assert (stats.resident_bytes, stats.loaded_bytes) == (1000, 1000)
    table.release("i", "a", 2.0)
    table.grant_due(2.0)
    stats = table.stats()
    assert (stats.num_resident, stats.num_leases, stats.num_waiting) == (1, 1, 0)
    assert (stats.num_loads, stats.num_evictions) == (2, 1)
    assert (stats.resident_bytes, stats.loaded_bytes) == (5000, 6000)


def test_residents_show_who_uses_them():
    table = make_table()
    table.acquire("i", "a", 1.0)
    table.acquire("j", "a", 2.0)
    (view,) = table.residents()
    assert (view.adapter_id, view.slot, view.num_running, view.last_used_s) == ("a", 0, 2, 2.0)


def test_largest_capacity_is_what_the_pages_hold_of_the_mean_size():
    table = LeaseTable(1, [10, 100], 1000, starvation_s=5.0)
    assert table.max_capacity() is None
    table.register("large", {0: {0: 3, 1: 1}, 1: {0: 1}})
    assert table.max_capacity() == 2, "two of 4 pages in 10"
    table.register("small", {0: {0: 1}, 1: {0: 1}})
    assert table.max_capacity() == 4, "10 pages, two and a half each"
    for number in range(9):
        table.register(str(number), {0: {0: 1}})
    assert table.max_capacity() == 7, "10 pages, 14 of 11 adapters"
    table.unregister("large")
    assert table.max_capacity() == 10
