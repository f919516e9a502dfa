# SPDX-License-Identifier: Apache-2.0
"""KV of one device without a host."""

from __future__ import annotations

from collections import Counter

import pytest

from moe_lora.cache.pages import BlockTable
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import lru

from .consistency import check


def cache_of(num_pages: int = 16, *, prefix_caching: bool = True) -> UnifiedCache:
    cache = UnifiedCache(
        num_device_pages=num_pages, block_size=4, policy=lru(), prefix_caching=prefix_caching
    )
    for namespace in range(10):
        cache.add_adapter(namespace, (), 0.0)
    return cache


def run_sequence(
    cache: UnifiedCache, namespace: int | None, tokens: list[int], now_s: float = 0.0
) -> BlockTable:
    table = cache.match(namespace, tokens, now_s)
    assert cache.grow(table, len(tokens), now_s)
    cache.publish(table, tokens, len(tokens), now_s)
    return table


def num_used(cache: UnifiedCache) -> int:
    return cache.usage()["device_kv_used"]


def num_cached(cache: UnifiedCache) -> int:
    return cache.usage()["device_kv"] - num_used(cache)


def test_finished_prefix_is_found_again_by_whole_blocks():
    cache = cache_of()
    table = run_sequence(cache, 0, list(range(10)))
    pages = list(table.pages)
    cache.release(table, 0.0)
    again = cache.match(0, list(range(10)), 1.0)
    assert again.pages == pages[:2]
    assert again.num_matched == 8
    assert again.ready


def test_last_token_is_always_left_to_compute():
    cache = cache_of()
    cache.release(run_sequence(cache, 0, list(range(8))), 0.0)
    assert cache.match(0, list(range(8)), 1.0).num_matched == 4


def test_other_namespace_finds_nothing():
    cache = cache_of()
    cache.release(run_sequence(cache, 1, list(range(12))), 0.0)
    assert not cache.match(2, list(range(12)), 1.0).pages
    assert not cache.match(None, list(range(12)), 1.0).pages


def test_running_sequences_share_the_page_of_an_equal_prefix():
    cache = cache_of()
    first = run_sequence(cache, 0, list(range(9)))
    second = run_sequence(cache, 0, list(range(9)))
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert num_used(cache) == 4


def test_equal_blocks_computed_side_by_side_become_one():
    cache = cache_of()
    tokens = list(range(9))
    tables = [cache.match(0, tokens, 0.0), cache.match(0, tokens, 0.0)]
    for table in tables:
        assert cache.grow(table, 9, 0.0)
    for table in tables:
        cache.publish(table, tokens, 9, 0.0)
    assert tables[0].pages[:2] == tables[1].pages[:2]
    assert num_used(cache) == 4


def test_prefixes_that_diverge_share_what_they_have_in_common():
    cache = cache_of()
    first = run_sequence(cache, 0, [*range(8), 50, 51, 52, 53])
    second = run_sequence(cache, 0, [*range(8), 60, 61, 62, 63])
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    check(cache, [first, second], Counter())


def test_decoded_blocks_lengthen_one_node():
    cache = cache_of()
    tokens = list(range(5))
    table = run_sequence(cache, 0, tokens)
    nodes = cache._tree.graph.number_of_nodes()
    for token in range(5, 30):
        tokens.append(token)
        assert cache.grow(table, len(tokens), 0.0)
        cache.publish(table, tokens, len(tokens), 0.0)
    assert cache._tree.graph.number_of_nodes() == nodes
    cache.release(table, 1.0)
    assert cache.match(0, tokens, 2.0).num_matched == 28


def test_cached_blocks_give_way_oldest_first():
    cache = cache_of(4)
    cache.release(run_sequence(cache, 0, list(range(8)), 0.0), 0.0)
    cache.release(run_sequence(cache, 0, list(range(100, 108)), 1.0), 1.0)
    table = cache.match(0, [7], 2.0)
    assert cache.grow(table, 8, 2.0)
    assert not cache.match(0, list(range(9)), 2.0).pages
    assert cache.match(0, list(range(100, 109)), 2.0).num_matched == 8


def test_only_the_end_of_a_long_prefix_gives_way():
    cache = cache_of(8)
    cache.release(run_sequence(cache, 0, list(range(32))), 0.0)
    assert cache.grow(cache.match(0, [99], 1.0), 8, 1.0)
    assert cache.match(0, list(range(32)), 2.0).num_matched == 24


def test_grow_takes_nothing_when_it_cannot_take_all():
    cache = cache_of(2)
    table = BlockTable(0)
    assert not cache.grow(table, 12, 0.0)
    assert num_used(cache) == 0
    assert cache.grow(table, 8, 0.0)


@pytest.mark.parametrize("max_kv_pages", [None, 12])
def test_grow_that_cannot_take_all_evicts_nothing(max_kv_pages):
    cache = UnifiedCache(num_device_pages=16, block_size=4, policy=lru(), max_kv_pages=max_kv_pages)
    cache.release(run_sequence(cache, None, list(range(20))), 0.0)
    running = run_sequence(cache, None, list(range(50, 78)))
    assert num_cached(cache) == 5
    newcomer = cache.match(None, [99], 1.0)
    assert not cache.grow(newcomer, 40, 1.0)
    assert num_cached(cache) == 5
    assert cache.grow(newcomer, 20, 1.0), "of what is idle as much as it takes gives way"
    assert cache.usage()["device_kv"] == (max_kv_pages or 16)
    check(cache, [running, newcomer], Counter())


def test_kv_keeps_within_its_bound():
    cache = UnifiedCache(num_device_pages=16, block_size=4, policy=lru(), max_kv_pages=4)
    first = cache.match(None, [0], 0.0)
    assert cache.grow(first, 12, 0.0)
    assert not cache.grow(cache.match(None, [0], 0.0), 8, 0.0)
    cache.publish(first, list(range(12)), 12, 0.0)
    cache.release(first, 0.0)
    assert cache.grow(cache.match(None, [0], 1.0), 8, 1.0)
    assert cache.usage()["device_kv"] == 4


def test_forgotten_namespace_frees_its_pages():
    cache = cache_of(4)
    cache.release(run_sequence(cache, 5, list(range(8))), 0.0)
    cache.forget(5)
    assert cache.usage()["device_free"] == 4
    with pytest.raises(KeyError):
        cache.match(5, list(range(9)), 1.0)


def test_forgotten_namespace_in_use_is_freed_with_its_last_user():
    cache = cache_of(4)
    table = run_sequence(cache, 5, list(range(9)))
    cache.forget(5)
    check(cache, [table], Counter())
    assert not cache.match(5, list(range(9)), 1.0).pages
    assert cache.usage()["device_kv"] == 3
    cache.release(table, 2.0)
    assert cache.usage()["device_free"] == 4


def test_without_prefix_caching_nothing_is_kept():
    cache = cache_of(prefix_caching=False)
    cache.release(run_sequence(cache, 0, list(range(8))), 0.0)
    assert num_cached(cache) == 0
