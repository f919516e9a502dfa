# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import pytest

from moe_lora.cache.orders import Copy, Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import (
    CachingPolicy,
    CostAware,
    FastLibra,
    fastlibra_wos,
    static_partition,
)
from moe_lora.timing.host_times import CacheCosts

from .consistency import check
from .test_unified_adapters import bring, confirm, leave_history

COSTS = CacheCosts(page_bytes=1 << 20, prefill_tokens_per_s=100.0)


def cache_of(policy: CachingPolicy, num_pages: int = 20, host_pages: int = 20) -> UnifiedCache:
    return UnifiedCache(num_device_pages=num_pages, num_host_pages=host_pages, block_size=4, policy=policy)


def history(number: int, num_blocks: int = 5) -> list[int]:
    return [number] * (4 * num_blocks)


def test_above_the_upper_threshold_the_least_valued_leaf_goes_to_the_host():
    cache = cache_of(fastlibra_wos())
    for number in range(4):
        leave_history(cache, None, history(number), float(number))
    cache.tick(10.0, 1)
    (order,) = cache.take_orders()
    assert isinstance(order, Copy)
    assert not order.to_device
    assert len(order.device_pages) == 5
    assert cache.usage()["device_free"] == 0, "its pages are reserved until the copy is done"
    cache.copied(order.copy_id)
    assert cache.usage()["device_free"] == 5
    assert cache.usage()["host_kv"] == 5
    assert cache.match(None, [*history(1), 9], 11.0).ready
    assert not cache.match(None, [*history(0), 9], 11.0).ready


def test_pages_on_their_way_out_are_not_swapped_out_again():
    cache = cache_of(fastlibra_wos())
    for number in range(4):
        leave_history(cache, None, history(number), float(number))
    cache.tick(10.0, 1)
    assert len(cache.take_orders()) == 1
    cache.tick(10.1, 1)
    assert not cache.take_orders()


def test_between_the_thresholds_nothing_moves():
    cache = cache_of(fastlibra_wos())
    for number in range(3):
        leave_history(cache, None, history(number), float(number))
    cache.tick(10.0, 1)
    assert not cache.take_orders()


def test_node_matched_on_its_way_out_stays():
    cache = cache_of(fastlibra_wos())
    for number in range(4):
        leave_history(cache, None, history(number), float(number))
    cache.tick(10.0, 1)
    table = cache.match(None, [*history(0), 9], 10.0)
    assert table.ready
    confirm(cache)
    assert cache.usage()["device_free"] == 0
    check(cache, [table], Counter())


def test_what_the_host_has_leaves_without_a_copy():
    cache = cache_of(fastlibra_wos())
    for number in range(4):
        leave_history(cache, None, history(number), float(number))
    cache.tick(10.0, 1)
    confirm(cache)
    table = cache.match(None, [*history(0), 9], 11.0)
    confirm(cache)
    cache.release(table, 11.0)
    for number in range(1, 4):
        cache.release(cache.match(None, [*history(number), 9], 12.0), 12.0)
    cache.tick(13.0, 1)
    assert not cache.take_orders()
    assert cache.usage()["device_free"] == 5
    assert cache.counters.pages_dropped == 0


def test_request_whose_prefix_is_on_the_host_waits_for_its_copy():
    cache = cache_of(fastlibra_wos())
    for number in range(4):
        leave_history(cache, None, history(number), float(number))
    cache.tick(10.0, 1)
    confirm(cache)
    table = cache.match(None, [*history(0), 9], 11.0)
    assert table.num_matched == 20
    assert not table.ready
    (order,) = cache.take_orders()
    assert order.to_device
    assert list(order.device_pages) == table.pages
    cache.copied(order.copy_id)
    assert table.ready
    counters = cache.counters
    assert (counters.kv_host_hit_tokens, counters.pages_in, counters.pages_out) == (20, 5, 5)


@pytest.mark.parametrize(("num_used", "num_found"), [(8, 3), (9, 2), (12, 2), (13, 1), (17, 0)])
def test_prefix_on_the_host_comes_as_far_as_there_is_room(num_used, num_found):
    cache = cache_of(fastlibra_wos())
    tokens: list[int] = []
    for number in range(3):
        tokens += history(number, 4)
        leave_history(cache, None, tokens, float(number))
    for node in reversed(cache._find(None, [*tokens, 9])[1:]):
        assert cache._swapper.swap_out(node, 10.0)
        confirm(cache)
    in_use = cache.match(None, [7], 11.0)
    assert cache.grow(in_use, 4 * num_used, 11.0)
    table = cache.match(None, [*tokens, 9], 11.0)
    assert table.num_matched == num_found * 16
    assert len(cache.take_orders()) == num_found
    check(cache, [in_use, table], Counter())


def test_copy_that_failed_is_told_to_who_waits_for_it():
    cache = cache_of(fastlibra_wos())
    for number in range(4):
        leave_history(cache, None, history(number), float(number))
    cache.tick(10.0, 1)
    confirm(cache)
    table = cache.match(None, [*history(0), 9], 11.0)
    (order,) = cache.take_orders()
    cache.failed(order.copy_id)
    assert table.lost
    assert not table.ready
    check(cache, [table], Counter())
    cache.release(table, 12.0)
    assert not cache.match(None, [*history(0), 9], 12.0).pages
    assert cache.usage()["device_free"] == 5


def test_adapter_that_could_not_be_brought_is_brought_again_only_for_who_asks():
    cache = cache_of(FastLibra(costs=COSTS))
    cache.add_adapter(1, (2,), 0.0)
    cache.hold(1, 0.0)
    (order,) = cache.take_orders()
    cache.failed(order.copy_id)
    cache.let_go(1, 0.0)
    cache.tick(1.0, 1)
    assert not cache.take_orders()
    check(cache, [], Counter())
    cache.hold(1, 2.0)
    assert len(confirm(cache)) == 1
    assert cache.readiness(1) is Readiness.READY
    cache.let_go(1, 2.0)
    check(cache, [], Counter())


def test_below_the_lower_threshold_host_roots_come_back_parents_first():
    cache = cache_of(FastLibra(costs=COSTS), 20, 40)
    cache.add_adapter(1, (2,), 0.0)
    bring(cache, 1)
    leave_history(cache, 1, history(0, 6), 0.0)
    in_use = []
    for now_s, blocks in ((1.0, 12), (2.0, 6)):
        table = cache.match(None, [7], now_s)
        assert cache.grow(table, 4 * blocks, now_s)
        in_use.append(table)
        cache.tick(now_s, 1)
        (order,) = confirm(cache)
        assert not order.to_device
    assert cache.place(1) == "host"
    for table in in_use:
        cache.release(table, 3.0)
    cache.tick(4.0, 1)
    orders = confirm(cache)
    assert [(order.to_device, order.is_adapter) for order in orders] == [(True, True), (True, False)]
    assert cache.usage()["device_kv"] == 6
    assert cache.place(1) == "device"


def test_adapter_leaves_only_after_its_history():
    """FastLibra maintains dependencies: device leaves first."""
    cache = cache_of(FastLibra(costs=COSTS), 20, 40)
    cache.add_adapter(1, (4,), 0.0)
    bring(cache, 1)
    leave_history(cache, 1, history(0, 3), 0.0)
    leave_history(cache, None, history(1, 13), 1.0)
    cache.match(None, [*history(1, 13), 9], 100.0)
    cache.tick(100.0, 1)
    (order,) = confirm(cache)
    assert not order.is_adapter
    assert order.namespace == 1
    table = cache.match(None, [3], 101.0)
    assert cache.grow(table, 12, 101.0)
    cache.tick(101.0, 1)
    (order,) = confirm(cache)
    assert order.is_adapter


def test_without_the_adapter_reward_another_node_is_swapped_out():
    """WOL decides differently inside the cache too: adapters are scarce, KV is visited a little more."""
    left = {}
    for rewards in (True, False):
        cache = cache_of(FastLibra(costs=COSTS, rewards_adapters=rewards), 20, 40)
        for namespace in range(1, 9):
            cache.add_adapter(namespace, (8,), 0.0)
        for namespace in range(1, 9):
            bring(cache, namespace, 0.0)
        assert cache.usage()["device_adapters"] == 16
        table = cache.match(None, [7], 1.0)
        assert cache.grow(table, 8, 1.0)
        cache.publish(table, [7] * 8, 8, 1.0)
        cache.release(table, 1.0)
        for _ in range(3):
            cache.release(cache.match(None, [7] * 9, 1.0), 1.0)
        blocker = cache.match(None, [5], 1.0)
        assert cache.grow(blocker, 8, 1.0)
        cache.tick(1.0, 64)
        left[rewards] = {order.is_adapter for order in cache.take_orders()}
    assert left == {True: {False}, False: {True}}


def test_history_is_backed_up_before_its_room_is_needed():
    cache = cache_of(CostAware(costs=COSTS))
    leave_history(cache, None, history(0), 0.0)
    for tick in range(5):
        cache.tick(1.0 + tick / 10, 1)
        confirm(cache)
    assert cache.usage()["host_kv"] == 5
    assert cache.usage()["device_kv"] == 5
    assert cache.grow(cache.match(None, [9], 2.0), 80, 2.0)
    assert cache.counters.pages_dropped == 0
    assert cache.match(None, [*history(0), 9], 3.0).num_matched == 0, "no room beside a full device"
    assert cache.usage()["host_kv"] == 5


def test_what_a_queued_request_needs_comes_first():
    """The newer history would stay, were it not for the request that waits for the older one."""
    for queued, kept in ((False, 1), (True, 0)):
        cache = cache_of(CostAware(costs=COSTS), 10, 0)
        for number in range(2):
            leave_history(cache, None, history(number), 100.0 * number)
        if queued:
            cache.look_ahead([(None, [*history(0), 9], "")])
        assert cache.grow(cache.match(None, [9], 200.0), 20, 200.0)
        assert cache.match(None, [*history(kept), 9], 200.0).num_matched == 20
        assert cache.match(None, [*history(1 - kept), 9], 200.0).num_matched == 0


def test_adapter_of_a_queued_request_is_fetched_ahead():
    cache = cache_of(CostAware(costs=COSTS))
    cache.add_adapter(1, (4,), 0.0)
    cache.tick(0.0, 1)
    assert not cache.take_orders()
    cache.look_ahead([(1, [1, 2, 3], "")])
    cache.tick(0.1, 1)
    (order,) = cache.take_orders()
    assert order.namespace == 1
    assert cache.readiness(1) is Readiness.LOADING


def test_parts_of_a_partition_are_balanced_each_by_itself():
    cache = cache_of(static_partition(0.5), 20, 40)
    for namespace in (1, 2):
        cache.add_adapter(namespace, (5,), 0.0)
        bring(cache, namespace, float(namespace))
    leave_history(cache, None, history(0, 4), 3.0)
    cache.tick(4.0, 1)
    (order,) = cache.take_orders()
    assert order.is_adapter
    assert order.namespace == 1


def test_without_a_host_nothing_is_swapped_out_ahead():
    cache = cache_of(fastlibra_wos(), 20, 0)
    leave_history(cache, None, history(0, 20), 0.0)
    cache.tick(1.0, 1)
    assert cache.usage()["device_kv"] == 20


def test_full_host_loses_what_it_values_least():
    cache = cache_of(fastlibra_wos(), 20, 5)
    for number in range(4):
        leave_history(cache, None, history(number), float(number))
    for tick in range(2):
        cache.tick(10.0 + tick, 1)
        confirm(cache)
        leave_history(cache, None, history(10 + tick), 10.5 + tick)
    assert cache.usage()["host_kv"] == 5
    assert not cache.match(None, [*history(0), 9], 20.0).pages
    check(cache, [], Counter())


@pytest.mark.parametrize(("lower", "upper"), [(0.9, 0.8), (-0.1, 0.5), (0.5, 1.1)])
def test_thresholds_must_be_shares_in_order(lower, upper):
    with pytest.raises(ValueError, match="must be shares"):
        UnifiedCache(num_device_pages=4, block_size=4, policy=fastlibra_wos(), lower=lower, upper=upper)


def test_empty_queue_wants_nothing():
    cache = cache_of(CostAware(costs=COSTS))
    cache.add_adapter(1, (4,), 0.0)
    cache.look_ahead([(1, [1, 2, 3], "")])
    cache.look_ahead([])
    cache.tick(0.1, 1)
    assert not cache.take_orders()
