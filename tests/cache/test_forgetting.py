# SPDX-License-Identifier: Apache-2.0
"""What a forgotten adapter leaves is freed a slice at a time, and gives way at once to what needs room."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from moe_lora.cache.node_mover import SLICE
from moe_lora.cache.orders import Copy, Readiness
from moe_lora.cache.pages import DYING
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import CACHING_POLICIES, make_caching_policy
from moe_lora.timing.host_times import CacheCosts

from .consistency import check

NUM_PROMPTS = 4 * SLICE
ADAPTER_PAGES = 6
COSTS = CacheCosts(page_bytes=1 << 20)
KEEPING = sorted(set(CACHING_POLICIES) - {"slora"})


def confirm(cache: UnifiedCache) -> list[object]:
    orders = cache.take_orders()
    for order in orders:
        cache.copied(order.copy_id)
    return list(orders)


def full_of(policy: str = "fastlibra", *, host_pages: int = 0) -> UnifiedCache:
    """Adapter 1 and its history, a page per prompt, have almost the whole device."""
    cache = UnifiedCache(
        num_device_pages=2 * ADAPTER_PAGES + int(NUM_PROMPTS / 0.8),
        num_host_pages=host_pages,
        block_size=2,
        policy=make_caching_policy(policy, COSTS),
        max_adapters=1,
    )
    cache.add_adapter(1, (ADAPTER_PAGES,), 0.0)
    assert cache.hold(1, 0.0) is Readiness.LOADING
    confirm(cache)
    for number in range(NUM_PROMPTS):
        leave(cache, 1, [number, number], 0.0)
    cache.let_go(1, 0.0)
    return cache


def leave(cache: UnifiedCache, namespace: int | None, tokens: list[int], now_s: float) -> None:
    table = cache.match(namespace, [*tokens, 0], now_s)
    assert cache.grow(table, len(tokens), now_s)
    cache.publish(table, tokens, len(tokens), now_s)
    cache.release(table, now_s)


def num_nodes(cache: UnifiedCache) -> int:
    return sum(node is not None for node in cache._tree.columns.nodes)


@pytest.mark.parametrize("policy", KEEPING)
def test_no_call_frees_more_than_a_slice_until_all_is_free(policy):
    cache = full_of(policy)
    sizes = [num_nodes(cache)]
    cache.forget(1)
    sizes.append(num_nodes(cache))
    while 1 in cache._tree.adapters:
        cache.tick(1.0, 0)
        check(cache, [], Counter())
        sizes.append(num_nodes(cache))
    assert all(0 < before - after <= SLICE for before, after in pairwise(sizes))
    assert len(sizes) > NUM_PROMPTS / SLICE
    assert cache.usage()["device_free"] == cache._mover.device.num_pages
    assert not cache._tree.columns.where(DYING).size


def test_pages_and_slot_of_the_adapter_itself_are_free_at_once():
    cache = full_of()
    left: list[object] = []
    cache.watch(left.append)
    cache.forget(1)
    assert left == [1]
    assert cache.usage()["device_adapters"] == 0
    cache.add_adapter(2, (ADAPTER_PAGES,), 1.0)
    assert cache.hold(2, 1.0) is Readiness.LOADING
    assert 1 in cache._tree.adapters, "its history is still there"
    assert cache.usage()["device_kv_invalid"] == 0, "nobody will ask for it"


def test_room_is_taken_from_what_is_forgotten_before_living_history():
    cache = full_of("lru")
    leave(cache, None, [7, 7], 0.0)
    cache.forget(1)
    table = cache.match(None, [1, 2], 5.0)
    device = cache._mover.device
    assert cache.grow(table, 2 * (device.num_pages - 1), 5.0)
    check(cache, [table], Counter())
    assert cache.match(None, [7, 7, 7], 5.0).num_matched == 2


@pytest.mark.parametrize("policy", ["fastlibra", "cost-aware"])
def test_what_is_forgotten_is_neither_copied_out_nor_back(policy):
    cache = full_of(policy, host_pages=NUM_PROMPTS)
    cache.tick(0.5, 0)
    confirm(cache)
    cache.forget(1)
    orders: list[object] = []
    for number in range(100):
        cache.tick(1.0 + 0.1 * number, 0)
        orders += confirm(cache)
    assert not [order for order in orders if isinstance(order, Copy)]
    assert cache.usage()["host_kv"] == cache.usage()["device_kv"] == 0


def test_sequence_of_a_forgotten_adapter_computes_on_but_leaves_nothing():
    cache = full_of()
    table = cache.match(1, [0, 0, 5], 1.0)
    cache.hold(1, 1.0)
    cache.forget(1)
    assert cache.grow(table, 6, 1.0)
    cache.publish(table, [0, 0, 5, 6, 7, 8], 6, 1.0)
    assert table.num_shared == 1
    check(cache, [table], Counter({1: 1}))
    cache.release(table, 1.0)
    cache.let_go(1, 1.0)
    for _ in range(NUM_PROMPTS // SLICE + 1):
        cache.tick(2.0, 0)
    assert set(cache._tree.adapters) == {None}
    assert cache.usage()["device_kv"] == cache.usage()["device_adapters"] == 0


@pytest.mark.parametrize("used", [False, True])
def test_all_is_evicted_while_a_forgotten_adapter_is_freed(used):
    cache = full_of()
    if used:
        cache.hold(1, 1.0)
    cache.add_adapter(2, (0,), 1.0)
    for number in range(NUM_PROMPTS // 8):
        leave(cache, 2, [number, number], 1.0)
    cache.forget(1)
    if used:
        cache.let_go(1, 1.0)
    cache.evict_all()
    assert set(cache._tree.adapters) == {None, 2}
    assert cache.usage()["device_free"] == cache._mover.device.num_pages
    check(cache, [], Counter())


def test_history_is_cleared_twice_while_a_forgotten_adapter_is_freed():
    cache = full_of()
    for number in range(NUM_PROMPTS // SLICE - 1):
        leave(cache, None, [number, number], 1.0)
    cache.forget(1)
    cache.clear_history([None])
    assert cache._tree.columns.where(DYING).size
    cache.clear_history([None])
    assert cache.match(None, [1, 1, 5], 3.0).num_matched == 0
    cache.evict_all()
    assert num_nodes(cache) == 1
    check(cache, [], Counter())
