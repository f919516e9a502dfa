# SPDX-License-Identifier: Apache-2.0
"""Tenants that fill one cache: a thousand cold adapters of one leave another what is its own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moe_lora.cache.orders import Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import CACHING_POLICIES, make_caching_policy
from moe_lora.timing.host_times import CacheCosts
from tests.grids import diagonal

from .consistency import check
from .test_unified_adapters import bring, confirm, leave_history

COSTS = CacheCosts(page_bytes=1 << 20)
PAGES, NUM_PAGES = 4, 80
OWN = range(8)
"""Adapters of the modest tenant, 32 of its 40 pages; the greedy one's are all others."""


def cache_of(policy: str, num_greedy: int, **sizes: int) -> UnifiedCache:
    sizes = {"num_device_pages": NUM_PAGES} | sizes
    cache = UnifiedCache(block_size=4, policy=make_caching_policy(policy, COSTS), **sizes)
    for namespace in range(len(OWN) + num_greedy):
        cache.add_adapter(namespace, (PAGES,), 0.0)
    return cache


def flood(cache: UnifiedCache, num: int, now_s: float) -> float:
    """The greedy tenant uses that many adapters, one after the other; when it is done."""
    for namespace in range(len(OWN), len(OWN) + num):
        now_s += 0.01
        cache.count_for("greedy", 1.0, now_s)
        if cache.hold(namespace, now_s) is Readiness.NO_ROOM:  # what makes room is being saved first
            confirm(cache)
            assert cache.hold(namespace, now_s) is not Readiness.NO_ROOM
        confirm(cache)
        leave_history(cache, namespace, [namespace] * 5, now_s)
        cache.let_go(namespace, now_s)
        cache.tick(now_s, 1)
        confirm(cache)
    check(cache, [], Counter())
    return now_s


def use_own(cache: UnifiedCache, now_s: float) -> float:
    for namespace in OWN:
        now_s += 0.01
        cache.count_for("modest", 1.0, now_s)
        bring(cache, namespace, now_s)
    return now_s


def num_own(cache: UnifiedCache) -> int:
    return sum(cache.place(namespace) == "device" for namespace in OWN)


POLICIES = sorted(set(CACHING_POLICIES) - {"slora"})  # which keeps nothing for anybody


@pytest.mark.parametrize(("num_host_pages", "policy"), diagonal((0, NUM_PAGES), POLICIES))
def test_cold_adapters_of_one_tenant_leave_anothers_where_they_are(policy, num_host_pages):
    sizes = {"num_host_pages": num_host_pages}
    if policy == "static":  # a fifth of it is adapters'
        sizes["num_device_pages"] = 5 * NUM_PAGES
    num = 1000 if policy == "cost-aware" and not num_host_pages else 100
    cache = cache_of(policy, num, **sizes)
    flood(cache, num, use_own(cache, 0.0))
    assert num_own(cache) == len(OWN), "less than its share: nothing of it had to go"


@pytest.mark.parametrize("policy", POLICIES)
def test_who_comes_has_its_share_though_another_filled_the_cache(policy):
    sizes = {"num_device_pages": 5 * NUM_PAGES} if policy == "static" else {}
    cache = cache_of(policy, 60, **sizes)
    now_s = flood(cache, 60, 0.0)
    usage = cache.usage()
    assert usage["device_adapters"] + usage["device_kv"] > 0.9 * NUM_PAGES, "it may fill it all"
    now_s = flood(cache, 60, use_own(cache, now_s))
    assert num_own(cache) == len(OWN)
    num_misses = cache.counters.adapter_misses
    use_own(cache, now_s)
    assert cache.counters.adapter_misses == num_misses


def test_history_that_came_from_elsewhere_counts_for_its_tenant():
    cache, moved = cache_of("lru", 0), list(range(12))
    cache.count_for("modest", 1.0, 0.0)
    table = cache.new_table(None)
    assert cache.grow(table, len(moved), 0.0)
    cache.publish(table, moved, len(moved), 0.0)
    cache.release(table, 0.0)
    for number in range(100):
        now_s = 0.01 * (number + 1)
        cache.count_for("greedy", 1.0, now_s)
        leave_history(cache, None, [1000 + number] * 9, now_s)
    assert cache.match(None, [*moved, 0], 2.0).num_matched == len(moved)


def test_places_of_adapters_are_shared_where_these_are_few():
    cache = cache_of("lru", 50, max_adapters=8)
    now_s = 0.0
    for namespace in OWN[:3]:
        now_s += 0.01
        cache.count_for("modest", 1.0, now_s)
        bring(cache, namespace, now_s)
    flood(cache, 50, now_s)
    assert num_own(cache) == 3


def test_without_a_second_tenant_the_policy_alone_decides():
    cache = cache_of("lru", 50)
    for namespace in OWN:
        cache.count_for("greedy", 1.0, 0.0)
        bring(cache, namespace, 0.0)
    flood(cache, 50, 0.0)
    assert num_own(cache) == 0
    cache.count_for("greedy", 1.0, 1.0)
    history = [7] * 300
    leave_history(cache, None, history, 1.0)
    assert cache.match(None, history, 2.0).num_matched > 0, "KV takes the place of adapters"


def test_one_adapter_stays_where_a_share_is_less_than_two():
    """Twelve places and eight tenants."""
    cache = cache_of("lru", 50, max_adapters=12)
    for number in range(6):
        cache.count_for(f"other{number}", 1.0, 0.0)
    cache.count_for("modest", 1.0, 0.0)
    bring(cache, 0, 0.0)
    flood(cache, 50, 0.0)
    assert cache.place(0) == "device"


class Scaled:
    """A policy whose values are as small, or large, as one likes."""

    def __init__(self, policy, factor, more):
        self._policy, self._factor, self._more = policy, factor, more

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def values(self, nodes, load):
        return self._factor * self._policy.values(nodes, load) + self._more


@pytest.mark.parametrize("max_adapters", [None, 20])
def test_of_what_is_beyond_a_share_the_least_valued_goes(max_adapters):
    """However small values are: of windows of pages, and of places."""
    cache = cache_of("cost-aware", 60, max_adapters=max_adapters)
    cache._ranking.policy = Scaled(cache._ranking.policy, 1e-6, 0.0)
    use_own(cache, 0.0)
    num_gone, random = 0, np.random.default_rng(0)
    for namespace in range(8, 68):
        now_s = 0.1 * namespace
        cache.count_for("greedy", 1.0, now_s)
        there = [one for one in range(8, namespace) if cache.place(one) == "device"]
        rows = np.array([cache._tree.adapters[one].row for one in there], np.int64)
        values = cache._ranking.values(rows, now_s) if there else np.empty(0)
        bring(cache, namespace, now_s)
        for _ in range(random.integers(5)):
            bring(cache, namespace, now_s)
        gone = [one for one in there if cache.place(one) != "device"]
        if gone:
            assert gone == [there[int(np.argmin(values))]]
            num_gone += 1
    assert num_gone == 60 - 12
    assert num_own(cache) == len(OWN)


def test_windows_that_are_alike_by_shares_differ_by_the_smallest_values():
    """Pages within shares before them take no digit from their sums."""
    cache = cache_of("lru", 12)
    for namespace in range(20):
        bring(cache, namespace, 0.0)
    order, costs = np.zeros(NUM_PAGES, np.int64), np.full(NUM_PAGES, 3e-9)
    order[:40], costs[:40] = NUM_PAGES + 1, 1.0
    costs[60:64] = 2e-9
    assert cache._room._cheapest_window(PAGES, (order, costs)) == 60


def test_values_may_be_as_large_as_a_policy_likes():
    cache = cache_of("lru", 20)
    cache._ranking.policy = Scaled(cache._ranking.policy, 1.0, 1e6)
    now_s = flood(cache, 20, use_own(cache, 0.0))
    for number in range(30):
        cache.count_for("greedy", 1.0, now_s)
        leave_history(cache, None, [1000 + number] * 41, now_s)
    assert num_own(cache) == len(OWN)
