# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.cache.orders import Copy, LoadAdapter, Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.errors import CapacityError
from moe_lora.policies.caching.caching import (
    CachingPolicy,
    CostAware,
    FastLibra,
    lru,
    slora,
    static_partition,
)
from moe_lora.timing.host_times import CacheCosts

from .consistency import check

COSTS = CacheCosts(page_bytes=1 << 20)


def cache_of(
    num_pages: int = 16,
    *,
    host_pages: int = 0,
    policy: CachingPolicy | None = None,
    max_adapters: int | None = None,
) -> UnifiedCache:
    return UnifiedCache(
        num_device_pages=num_pages,
        num_host_pages=host_pages,
        block_size=4,
        policy=policy or lru(),
        max_adapters=max_adapters,
    )


def confirm(cache: UnifiedCache) -> list[object]:
    orders = cache.take_orders()
    for order in orders:
        cache.copied(order.copy_id)
    return list(orders)


def bring(cache: UnifiedCache, namespace: int, now_s: float = 0.0) -> None:
    """Held, loaded, let go again."""
    assert cache.hold(namespace, now_s) is not Readiness.NO_ROOM
    confirm(cache)
    assert cache.readiness(namespace) is Readiness.READY
    cache.let_go(namespace, now_s)


def leave_history(cache: UnifiedCache, namespace: int | None, tokens: list[int], now_s: float) -> None:
    table = cache.match(namespace, tokens, now_s)
    assert cache.grow(table, len(tokens), now_s)
    cache.publish(table, tokens, len(tokens), now_s)
    cache.release(table, now_s)


def test_adapter_is_loaded_from_its_files_into_a_run_per_layer():
    cache = cache_of()
    cache.add_adapter(1, (2, 0, 3), 0.0)
    assert cache.place(1) == "disk"
    assert cache.hold(1, 0.0) is Readiness.LOADING
    (order,) = cache.take_orders()
    assert order == LoadAdapter(order.copy_id, 1, (0, -1, 2))
    cache.copied(order.copy_id)
    assert cache.readiness(1) is Readiness.READY
    assert cache.place(1) == "device"
    assert cache.layer_first_pages(1) == (0, -1, 2)
    assert cache.hold(1, 1.0) is Readiness.READY
    assert (cache.counters.adapter_hits, cache.counters.adapter_misses) == (1, 1)


def test_two_requests_wait_for_one_load():
    cache = cache_of()
    cache.add_adapter(1, (2,), 0.0)
    assert cache.hold(1, 0.0) is cache.hold(1, 0.0) is Readiness.LOADING
    assert len(cache.take_orders()) == 1


def test_base_and_adapters_whose_bytes_lie_elsewhere_are_always_ready():
    cache = cache_of(1)
    cache.add_adapter(1, (0, 0), 0.0)
    for namespace in (None, 1):
        assert cache.hold(namespace, 0.0) is Readiness.READY
        leave_history(cache, namespace, [1, 2, 3, 4], 0.0)
        cache.let_go(namespace, 0.0)
    assert not cache.take_orders()


def test_adapter_that_could_never_be_held_is_refused():
    with pytest.raises(CapacityError, match="needs 17 pages, the device keeps at most 16"):
        cache_of().add_adapter(1, (17,), 0.0)
    with pytest.raises(CapacityError, match="at most 3"):
        cache_of(policy=static_partition(0.2)).add_adapter(1, (4,), 0.0)


def test_known_namespace_is_refused():
    cache = cache_of()
    cache.add_adapter(1, (1,), 0.0)
    with pytest.raises(ValueError, match="namespace 1 is known"):
        cache.add_adapter(1, (1,), 0.0)


def test_least_recently_used_idle_adapter_gives_way():
    cache = cache_of(8)
    left: list[object] = []
    cache.watch(left.append)
    for namespace in (1, 2, 3):
        cache.add_adapter(namespace, (4,), 0.0)
    bring(cache, 1, 0.0)
    bring(cache, 2, 1.0)
    bring(cache, 1, 2.0)
    bring(cache, 3, 3.0)
    assert left == [2]
    assert [cache.place(namespace) for namespace in (1, 2, 3)] == ["device", "disk", "device"]
    assert cache.counters.adapter_evictions == 1


def test_held_and_pinned_adapters_stay():
    cache = cache_of(8)
    for namespace in (1, 2, 3):
        cache.add_adapter(namespace, (4,), 0.0)
    bring(cache, 2)
    cache.pin(2)
    assert cache.hold(1, 0.0) is Readiness.LOADING
    confirm(cache)
    assert cache.hold(3, 1.0) is Readiness.NO_ROOM
    cache.unpin(2)
    assert cache.hold(3, 2.0) is Readiness.LOADING
    assert cache.place(2) == "disk"


def test_slots_bound_the_adapters_on_the_device():
    cache = cache_of(16, max_adapters=1)
    for namespace in (1, 2):
        cache.add_adapter(namespace, (2,), 0.0)
    assert cache.hold(1, 0.0) is Readiness.LOADING
    confirm(cache)
    assert cache.hold(2, 1.0) is Readiness.NO_ROOM
    cache.let_go(1, 2.0)
    assert cache.hold(2, 3.0) is Readiness.LOADING
    assert cache.place(1) == "disk"


def test_slot_is_freed_of_an_adapter_together_with_its_history():
    cache = cache_of(16, max_adapters=1, policy=FastLibra(costs=COSTS))
    for namespace in (1, 2):
        cache.add_adapter(namespace, (2,), 0.0)
    bring(cache, 1)
    assert cache.hold(1, 0.0) is Readiness.READY
    leave_history(cache, 1, [1] * 8, 0.0)
    cache.let_go(1, 0.0)
    assert cache.hold(2, 1.0) is Readiness.LOADING
    assert cache.usage()["device_kv"] == 0
    check(cache, [], Counter({2: 1}))


@settings(deadline=None)
@given(
    held=st.lists(st.booleans(), min_size=16, max_size=16),
    lengths=st.lists(st.integers(1, 3), min_size=16, max_size=16),
    num_pages=st.integers(1, 16),
)
def test_extent_fits_exactly_where_no_page_in_use_is_in_the_way(held, lengths, num_pages):
    """History of 1 to 3 blocks a node fills the arena; what is idle of it gives way, wherever it lies."""
    cache = cache_of(16)
    cache.add_adapter(1, (num_pages,), 0.0)
    used = []
    for number, blocks in enumerate(lengths):
        table = cache.match(None, [number], 0.0)
        if cache.usage()["device_free"] < blocks:
            break
        assert cache.grow(table, 4 * blocks, float(number))
        cache.publish(table, [number] * 4 * blocks, 4 * blocks, float(number))
        used.append(table)
    kept = [table for table, keep in zip(used, held, strict=False) if keep]
    stuck = {page for table in kept for page in table.pages}
    for table in used:
        if table not in kept:
            cache.release(table, 20.0)
    fits = any(not stuck & set(range(first, first + num_pages)) for first in range(17 - num_pages))
    assert (cache.hold(1, 30.0) is Readiness.LOADING) == fits
    check(cache, kept, Counter({1: int(fits)}))


def test_history_in_an_adapters_place_is_saved_to_the_host_first():
    cache = cache_of(16, host_pages=16)
    cache.add_adapter(1, (4,), 0.0)
    for number in range(4):
        leave_history(cache, None, [number] * 16, float(number))
    assert cache.hold(1, 5.0) is Readiness.NO_ROOM
    assert cache.hold(1, 5.0) is Readiness.NO_ROOM
    (order,) = confirm(cache)
    assert isinstance(order, Copy)
    assert not order.to_device
    assert cache.hold(1, 6.0) is Readiness.LOADING
    assert cache.counters.pages_dropped == 0
    assert cache.usage()["host_kv"] == 4
    check(cache, [], Counter({1: 1}))


def test_pinned_pages_in_every_window_leave_no_room():
    """9 pages are idle, but no 4 of them side by side."""
    cache = cache_of(12)
    cache.add_adapter(1, (4,), 0.0)
    tables = []
    for number in range(12):
        table = cache.match(None, [number] * 4, 0.0)
        assert cache.grow(table, 4, 0.0)
        cache.publish(table, [number] * 4, 4, 0.0)
        tables.append(table)
    held = [table for table in tables if table.pages[0] % 4 == 2]
    for table in tables:
        if table not in held:
            cache.release(table, 1.0)
    assert cache.hold(1, 2.0) is Readiness.NO_ROOM
    cache.add_adapter(2, (3, 2), 0.0)
    assert cache.hold(2, 3.0) is Readiness.LOADING
    check(cache, held, Counter({2: 1}))


def test_adapter_too_large_for_what_is_idle_evicts_nothing():
    cache = cache_of(8)
    cache.add_adapter(1, (6,), 0.0)
    leave_history(cache, None, [1] * 16, 0.0)
    table = cache.match(None, [9], 1.0)
    assert cache.grow(table, 16, 1.0)
    assert cache.hold(1, 2.0) is Readiness.NO_ROOM
    assert cache.match(None, [1] * 17, 3.0).num_matched == 16


def test_removed_adapter_is_freed_once_its_load_is_over():
    cache = cache_of()
    cache.add_adapter(1, (4,), 0.0)
    assert cache.hold(1, 0.0) is Readiness.LOADING
    cache.let_go(1, 0.0)
    cache.forget(1)
    assert cache.usage()["device_adapters"] == 4
    confirm(cache)
    assert cache.usage()["device_free"] == 16
    cache.add_adapter(1, (2,), 1.0)


def test_new_version_finds_no_history_of_the_old_one():
    cache = cache_of()
    for namespace in (1, 2):
        cache.add_adapter(namespace, (1,), 0.0)
        bring(cache, namespace)
    leave_history(cache, 1, [1] * 8, 0.0)
    cache.forget(1)
    assert not cache.match(2, [1] * 8, 1.0).pages
    assert cache.usage()["device_kv"] == 0


def visits(cache: UnifiedCache, namespace: int) -> float:
    return cache._tree.columns.visits.item(cache._tree.adapters[namespace].row)


def test_request_that_holds_its_adapter_again_is_one_visit():
    cache = cache_of()
    cache.add_adapter(1, (2,), 0.0)
    bring(cache, 1)
    for _ in range(3):
        assert cache.hold(1, 1.0, again=True) is Readiness.READY
        cache.let_go(1, 1.0)
    assert visits(cache, 1) == 1
    assert (cache.counters.adapter_hits, cache.counters.adapter_misses) == (0, 1)


def test_new_version_is_as_popular_as_the_one_it_replaces():
    cache = cache_of(4, policy=FastLibra(costs=COSTS))
    for namespace in (1, 2):
        cache.add_adapter(namespace, (2,), 0.0)
    for now_s in range(5):
        bring(cache, 1, float(now_s))
        cache.release(cache.match(None, [0], float(now_s)), float(now_s))
    bring(cache, 2, 5.0)
    cache.add_adapter(3, (2,), 5.0, inherits=1)
    cache.forget(1)
    assert visits(cache, 3) == 5
    assert cache.hold(3, 5.0) is Readiness.LOADING
    confirm(cache)
    cache.let_go(3, 5.0)
    cache.add_adapter(4, (2,), 5.0)
    bring(cache, 4, 5.0)
    assert [cache.place(namespace) for namespace in (2, 3)] == ["disk", "device"]


def test_version_to_replace_must_be_known():
    cache = cache_of()
    with pytest.raises(KeyError):
        cache.add_adapter(2, (1,), 0.0, inherits=1)
    cache.add_adapter(2, (1,), 0.0)


def test_load_that_failed_leaves_no_trace_and_can_be_tried_again():
    cache = cache_of()
    cache.add_adapter(1, (4,), 0.0)
    assert cache.hold(1, 0.0) is Readiness.LOADING
    (order,) = cache.take_orders()
    cache.failed(order.copy_id)
    assert cache.readiness(1) is Readiness.NO_ROOM
    assert cache.usage()["device_free"] == 16
    cache.let_go(1, 0.0)
    bring(cache, 1, 1.0)


def test_unknown_order_is_refused():
    with pytest.raises(KeyError):
        cache_of().copied(7)


def test_slora_keeps_no_adapter_without_requests_and_no_history():
    cache = cache_of(host_pages=8, policy=slora())
    cache.add_adapter(1, (4,), 0.0)
    assert cache.hold(1, 0.0) is Readiness.LOADING
    confirm(cache)
    leave_history(cache, 1, [1] * 8, 0.0)
    assert cache.usage()["device_kv"] == 0
    cache.let_go(1, 0.0)
    (order,) = confirm(cache)
    assert isinstance(order, Copy)
    assert not order.to_device
    assert cache.place(1) == "host"
    assert cache.hold(1, 1.0) is Readiness.LOADING
    (order,) = confirm(cache)
    assert isinstance(order, Copy)
    assert order.to_device
    assert order.is_adapter


def test_static_partition_keeps_kv_out_of_the_adapters_part():
    cache = cache_of(10, policy=static_partition(0.2))
    cache.add_adapter(1, (2,), 0.0)
    assert not cache.grow(cache.match(None, [1], 0.0), 4 * 9, 0.0)
    assert cache.grow(cache.match(None, [1], 0.0), 4 * 8, 0.0)
    assert cache.hold(1, 1.0) is Readiness.LOADING


def test_kv_without_its_adapter_is_counted_as_invalid():
    cache = cache_of(8)
    for namespace in (1, 2):
        cache.add_adapter(namespace, (4,), 0.0)
    bring(cache, 1, 0.0)
    leave_history(cache, 1, [1] * 8, 5.0)
    cache.pin(2)
    assert cache.usage()["device_kv_invalid"] == 0
    bring(cache, 2, 6.0)
    assert cache.place(1) == "disk"
    assert cache.usage()["device_kv_invalid"] == 2


def test_base_is_not_forgotten():
    with pytest.raises(ValueError, match="base model"):
        cache_of().forget(None)


def test_remote_adapter_counts_as_ready_only_while_the_server_holds_it():
    cache = cache_of()
    cache.add_adapter(1, (0,), 0.0)
    row = cache._tree.adapters[1].row
    for held in (False, True):
        cache.note_remote(1, held)
        leave_history(cache, 1, [int(held)] * 4, 0.0)
        view = cache._tree.columns.view(np.array([row]), 1.0)
        assert view.adapter_ready.tolist() == [held]
    assert cache.hold(1, 0.0) is Readiness.READY, "whether to wait for the server is the caller's business"


@pytest.mark.parametrize("waits", [False, True])
def test_a_window_that_was_chosen_before_a_save_does_not_outlast_it(waits):
    """An adapter's request is aborted, or finds free pages; later the window has other history."""
    cache = UnifiedCache(num_device_pages=8, num_host_pages=32, block_size=4, policy=CostAware(costs=COSTS))
    cache.add_adapter("a", [4], 0.0)
    for number in (1, 2):
        leave_history(cache, None, [number] * 16, float(number))
    assert cache.hold("a", 3.0) is Readiness.NO_ROOM
    confirm(cache)
    cache.clear_history([None])
    if waits:
        cache.hold("a", 4.0)
        confirm(cache)
        cache.let_go("a", 5.0)
    cache.evict_all()
    hot, cold = [3] * 16, [4] * 16
    leave_history(cache, None, hot, 10.0)
    leave_history(cache, None, cold, 11.0)
    for second in range(5):
        cache.release(cache.match(None, [*hot, 0], 1000.0 + second), 1000.0 + second)
    assert cache.hold("a", 1010.0) is Readiness.NO_ROOM, "the cold history is saved first"
    confirm(cache)
    assert cache.match(None, [*hot, 0], 1010.0).num_matched == 16
