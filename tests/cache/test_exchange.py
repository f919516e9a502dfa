# SPDX-License-Identifier: Apache-2.0
"""Bringing in ahead of need what is worth more than what is there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from moe_lora.cache.orders import Copy
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import CacheLoad, Floats, NodeColumns, Traits

from .consistency import check
from .test_unified_adapters import bring, confirm, leave_history

NUM_HISTORIES, NUM_BLOCKS = 40, 10


@dataclass
class ByAge:
    """What was used last is worth most, or least."""

    newest_first: bool = True
    adapter_recent_s: float = 60.0
    traits = Traits(backs_up=True, exchanges=True, drops_backed_first=False)

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return 1 / (1 + nodes.idle_s) if self.newest_first else nodes.idle_s**8

    host_values = values

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return True


def full_cache(policy: ByAge) -> UnifiedCache:
    """40 histories, of which the oldest ones have left a device of 400 pages."""
    cache = UnifiedCache(num_device_pages=400, num_host_pages=400, block_size=4, policy=policy)
    for number in range(NUM_HISTORIES):
        leave_history(cache, None, [number] * (4 * NUM_BLOCKS), float(number))
    for moment_s in (100.0, 100.1, 100.2, 100.3, 100.4):
        cache.tick(moment_s, 1)
        confirm(cache)
    return cache


def moves(cache: UnifiedCache) -> tuple[int, int]:
    """Pages ordered in and out."""
    orders = [order for order in cache.take_orders() if isinstance(order, Copy)]
    inward = sum(len(order.device_pages) for order in orders if order.to_device)
    return inward, sum(len(order.device_pages) for order in orders if not order.to_device)


def test_worth_more_than_what_is_there_takes_its_place_without_a_copy_out():
    policy = ByAge()
    cache = full_cache(policy)
    used = cache.usage()["device_kv"]
    assert used == 380
    policy.newest_first = False
    cache.tick(101.0, 1)
    inward, _ = moves(cache)
    assert inward == NUM_BLOCKS
    assert cache.usage()["device_kv"] <= used
    check(cache, [], Counter())


def test_nothing_changes_places_with_its_like():
    cache = full_cache(ByAge())
    cache.tick(101.0, 1)
    assert moves(cache)[0] == 0


def test_no_more_is_on_its_way_than_a_tick_may_order():
    policy = ByAge()
    cache = full_cache(policy)
    policy.newest_first = False
    cache.tick(101.0, 1)
    cache.tick(101.1, 1)
    assert moves(cache)[0] == NUM_BLOCKS


def test_history_comes_in_for_other_history_where_that_is_at_its_limit():
    """100 pages of 400 for KV: much of the device is free, and stays so."""
    policy = ByAge()
    cache = UnifiedCache(
        num_device_pages=400, num_host_pages=400, block_size=4, policy=policy, max_kv_pages=100
    )
    for number in range(NUM_HISTORIES):
        leave_history(cache, None, [number] * (4 * NUM_BLOCKS), float(number))
        cache.tick(float(number), 1)
        confirm(cache)
    policy.newest_first = False
    for moment in range(5):
        cache.tick(101.0 + moment, 1)
        assert moves(cache)[0] == NUM_BLOCKS * (moment == 0)
        assert cache.usage()["device_kv"] <= 100
    check(cache, [], Counter())


@pytest.mark.parametrize("backed", [True, False])
def test_adapter_without_a_slot_comes_in_for_another_adapter_or_lets_history_come(backed):
    """Adapter 2, which the host has too or not, has pushed 1, worth more now, out of the only slot of a full
    device.
    """
    policy = ByAge()
    cache = UnifiedCache(
        num_device_pages=400, num_host_pages=800, block_size=4, policy=policy, max_adapters=1
    )
    for namespace in (1, 2):
        cache.add_adapter(namespace, (2,), 0.0)
        bring(cache, namespace, float(namespace))
    if not backed:
        cache.pin(2)
    for number in range(NUM_HISTORIES + 5):
        leave_history(cache, None, [number] * (4 * NUM_BLOCKS), 10.0 + number)
        cache.tick(10.0 + number, 1)
        confirm(cache)
    if backed:  # it had been swapped out meanwhile
        bring(cache, 2, 60.0)
    else:
        cache.unpin(2)
    policy.newest_first = False
    cache.tick(101.0, 1)
    orders = confirm(cache)
    assert cache.place(1) == ("device" if backed else "disk")
    assert any(isinstance(order, Copy) and order.to_device for order in orders) != backed
    check(cache, [], Counter())
