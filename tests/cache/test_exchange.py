"""Bringing in ahead of need what is worth more than what is there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moe_lora.cache.orders import Copy
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching import CacheLoad, Floats, NodeColumns, Traits

from .consistency import check
from .test_unified_adapters import confirm, leave_history

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
