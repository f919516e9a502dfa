# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.api import InProcessClient
from moe_lora.cache.orders import Readiness
from moe_lora.cache.pages import BlockTable
from moe_lora.config import EngineConfig
from moe_lora.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    BusyError,
    CapacityError,
    EngineDeadError,
    StorageError,
)
from moe_lora.core.request import COMPOSED
from moe_lora.engine.adapters.adapter_store import AdapterStore, AdapterVersion, Failure
from moe_lora.engine.build import build_engine
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.timing.host_times import CacheCosts
from tests.engine.parts import PAGE_BYTES, Parts, packed
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[3] / "demo"


def test_adapter_lies_in_the_arena_where_its_slot_says():
    parts = Parts()
    adapter = parts.manager.add(packed("a", num_pages=2, value=3.0), None)
    assert parts.acquire(adapter)
    offset = int(parts.slots.a_offset[adapter.slot, 0, 0])
    assert parts.arena[offset : offset + 2 * PAGE_BYTES].view(torch.float32).eq(3.0).all()
    assert parts.slots.lora_rank[adapter.slot, 0, 0] == 1
    info = parts.manager.info(adapter)
    assert (info.residency, info.num_pages, info.pinned, info.idle_s) == ("device", 2, False, 0.0)


def test_idle_adapter_makes_room_and_running_one_does_not():
    parts = Parts(max_loras=1)
    a, b = (parts.manager.add(packed(name), None) for name in "ab")
    assert parts.acquire(a)
    assert not parts.acquire(b)
    parts.manager.release(a)
    assert parts.acquire(b)
    assert a.slot is None
    assert parts.cache.counters.adapter_evictions == 1


def test_several_idle_adapters_leave_for_a_large_one():
    parts = Parts(num_pages=4, max_loras=4)
    small = [parts.manager.add(packed(name), None) for name in "abc"]
    for adapter in small:
        parts.acquire(adapter)
        parts.manager.release(adapter)
    large = parts.manager.add(packed("large", num_pages=3), None)
    assert parts.acquire(large)
    assert sum(adapter.slot is None for adapter in small) >= 2


def test_idle_adapters_make_room_for_kv():
    parts = Parts(num_pages=6, max_loras=4)
    for name in "abc":
        adapter = parts.manager.add(packed(name, num_pages=2), None)
        assert parts.acquire(adapter)
        parts.manager.release(adapter)
    assert parts.num_free == 0
    parts.add("base", range(14))
    assert parts.step() == {"base": 14}


def test_adapter_that_running_ones_leave_no_room_for_drives_nobody_out():
    parts = Parts(num_pages=5, max_loras=4)
    idle, held, large = (
        parts.manager.add(packed(name, num_pages), None)
        for name, num_pages in (("idle", 1), ("held", 2), ("large", 4))
    )
    for adapter in (idle, held):
        assert parts.acquire(adapter)
    parts.manager.release(idle)
    assert not parts.acquire(large)
    assert idle.slot is not None


def test_adapter_waits_for_a_run_of_pages_where_kv_and_running_ones_leave_gaps():
    parts = Parts(num_pages=6, max_loras=4)
    table = BlockTable(None)
    assert parts.cache.grow(table, 12, 0.0)
    first, gap, last = (parts.manager.add(packed(name), None) for name in ("first", "gap", "last"))
    for adapter in (first, gap, last):
        assert parts.acquire(adapter)
    parts.manager.release(gap)
    parts.manager.remove("gap")
    wide = parts.manager.add(packed("wide", num_pages=2), None)
    assert not parts.acquire(wide)
    assert parts.num_free == 1
    parts.cache.release(table, 0.0)
    assert parts.acquire(wide)


def test_failed_attempt_leaves_no_page_taken():
    parts = Parts(num_pages=4, max_loras=4)
    assert parts.cache.grow(BlockTable(None), 1, 0.0)
    held = parts.manager.add(packed("held"), None)
    parts.acquire(held)
    large = parts.manager.add(packed("large", num_pages=3), None)
    assert parts.num_free == 2
    assert not parts.acquire(large)
    assert parts.num_free == 2
    assert large.slot is None


def test_adapter_is_ready_when_its_copy_is_done_and_not_before():
    parts = Parts(prompt=False)
    adapter = parts.manager.add(packed("a", value=3.0), None)
    assert parts.manager.acquire(adapter) is Readiness.LOADING
    parts.transfers.send()
    assert (adapter.slot, parts.transfers.busy) == (None, True)
    assert not parts.slots.lora_rank.any()
    told = []
    parts.transfers.on_change = lambda: told.append(True)
    parts.mover.work()
    parts.transfers.settle()
    assert (told, parts.transfers.busy) == ([True], False)
    assert parts.manager.readiness(adapter) is Readiness.READY
    assert adapter.slot is not None


def test_adapter_removed_while_it_comes_leaves_nothing_behind():
    parts = Parts(prompt=False)
    adapter = parts.manager.add(packed("a", num_pages=2), None)
    num_free = parts.num_free
    parts.manager.acquire(adapter)
    parts.transfers.send()
    parts.manager.release(adapter)
    parts.manager.remove("a")
    assert len(parts.kept) == 0
    parts.mover.work()
    parts.transfers.settle()
    assert (parts.num_free, adapter.slot) == (num_free, None)
    assert not parts.slots.lora_rank.any()
    again = parts.manager.add(packed("b"), None)
    assert parts.manager.acquire(again) is Readiness.LOADING


def test_new_version_serves_new_requests_while_the_old_one_finishes():
    parts = Parts()
    old = parts.manager.add(packed("a", value=1.0), None)
    parts.acquire(old)
    new = parts.manager.add(packed("a", value=2.0), None, replace=True)
    assert parts.manager.current("a") is new
    assert new.version == 2
    assert old.slot is not None
    parts.manager.release(old)
    assert old.slot is None


def test_version_has_the_number_that_is_given_or_the_next_one():
    parts = Parts()
    versions = [
        parts.manager.add(packed("a", value=float(number or 0)), None, replace=True, version=number).version
        for number in (7, None, 8)
    ]
    assert versions == [7, 8, 8]


def test_removed_adapter_is_unknown_and_its_pages_are_free():
    parts = Parts()
    adapter = parts.manager.add(packed("a", num_pages=2), None)
    free = parts.num_free
    parts.acquire(adapter)
    parts.manager.release(adapter)
    parts.manager.remove("a")
    assert parts.num_free == free
    with pytest.raises(AdapterNotFoundError, match="'a' is not loaded"):
        parts.manager.current("a")


def test_taken_name_and_impossible_size_are_refused():
    parts = Parts(room_pages=4)
    parts.manager.add(packed("a"), None)
    with pytest.raises(AdapterExistsError, match="'a' is already loaded"):
        parts.manager.add(packed("a"), None)
    with pytest.raises(CapacityError, match="raise arena_mb"):
        parts.manager.add(packed("huge", num_pages=5), None)
    assert len(parts.kept) == 1


def test_pinned_adapter_is_brought_in_and_stays_whoever_needs_room():
    parts = Parts(num_pages=5, room_pages=4, max_loras=3)
    pinned, *others = (parts.manager.add(packed(name, num_pages=2), None) for name in "abc")
    parts.manager.pin(pinned)
    for other in others * 2:
        assert parts.acquire(other)
        parts.manager.release(other)
    assert pinned.slot is not None
    assert parts.manager.info(pinned).pinned
    parts.manager.unpin(pinned)
    table = BlockTable(None)
    assert parts.cache.grow(table, 5 * 4, 0.0)
    assert pinned.slot is None


def test_pins_that_leave_no_room_for_a_request_are_refused():
    parts = Parts(num_pages=6, room_pages=5, max_loras=4)
    first, second, _ = (parts.manager.add(packed(name, num_pages=2), None) for name in "abc")
    parts.manager.pin(first)
    with pytest.raises(CapacityError, match=r"'b' of 0\.000 MB can't be pinned.*raise arena_mb"):
        parts.manager.pin(second)
    with pytest.raises(CapacityError, match="pinned; raise arena_mb or unpin"):
        parts.manager.add(packed("large", num_pages=4), None)
    parts.manager.unpin(first)
    parts.manager.pin(second)


def test_pins_leave_a_slot_for_others_as_long_as_there_are_others():
    parts = Parts(max_loras=1)
    first, _ = (parts.manager.add(packed(name), None) for name in "ab")
    with pytest.raises(CapacityError, match="must stay free for others; unpin another adapter or raise"):
        parts.manager.pin(first)
    parts.manager.remove("b")
    parts.manager.pin(first)
    with pytest.raises(CapacityError, match=r"'c' finds no slot.*raise max_loras"):
        parts.manager.add(packed("c"), None)


def test_new_version_of_a_pinned_adapter_is_pinned():
    parts = Parts()
    old = parts.manager.add(packed("a"), None)
    parts.manager.pin(old)
    new = parts.manager.add(packed("a", value=2.0), None, replace=True)
    assert (old.pinned, new.pinned) == (False, True)
    parts.manager.remove("a")
    assert parts.num_free == parts.cache.usage()["device_free"] == 20


def visits(parts: Parts, adapter: AdapterVersion) -> float:
    columns, adapters = parts.cache._tree.columns, parts.cache._tree.adapters
    return columns.visits.item(adapters[adapter.uid].row)


def test_pin_is_no_visit_and_a_new_version_inherits_those_of_the_old_one():
    parts = Parts()
    old = parts.manager.add(packed("a"), None)
    parts.manager.pin(old)
    assert visits(parts, old) == 0
    for _ in range(3):
        assert parts.acquire(old)
        parts.manager.release(old)
    new = parts.manager.add(packed("a"), None, replace=True)
    other = parts.manager.add(packed("b"), None)
    assert (visits(parts, new), visits(parts, other)) == (3, 0)


def test_request_that_is_put_back_visits_its_adapter_once():
    parts = Parts(num_pages=6, max_num_batched_tokens=32)
    adapter = parts.manager.add(packed("a"), None)
    table = BlockTable(None)
    assert parts.cache.grow(table, 13, 0.0)
    waiting = parts.add("one", range(8), adapter)
    for _ in range(5):
        assert not parts.step()
    assert waiting.matched
    assert visits(parts, adapter) == 1
    parts.cache.release(table, 0.0)
    assert parts.step() == {"one": 8}
    assert visits(parts, adapter) == 1


def test_pinned_adapter_that_is_replaced_again_before_anything_moved_is_there_in_the_end():
    parts = Parts(num_pages=8, max_loras=4, prompt=False)
    parts.manager.pin(parts.manager.add(packed("a"), None))
    for value in (2.0, 3.0, 4.0):
        last = parts.manager.add(packed("a", value=value), None, replace=True)
    parts.move()
    assert parts.manager.info(last).residency == "device"
    assert parts.num_free == 7
    parts.manager.remove("a")
    assert (parts.num_free, len(parts.kept)) == (8, 0)
    assert not parts.slots.lora_rank.any()


def test_adapter_that_is_pinned_in_an_idle_engine_is_brought_at_the_next_tick():
    parts = Parts(prompt=False)
    assert parts.transfers.tick(0) is None
    adapter = parts.manager.add(packed("a"), None)
    parts.manager.pin(adapter)
    parts.transfers.tick(0)
    assert parts.transfers.busy


@pytest.mark.parametrize("policy", ["fastlibra", "lru", "cost-aware"])
def test_pinned_adapter_comes_though_history_is_saved_in_its_place_first(policy):
    parts = Parts(num_pages=8, num_host_pages=16, policy=policy, prompt=False, max_num_batched_tokens=64)
    history = parts.add("history", range(32))
    parts.step()
    parts.scheduler.finish(history)
    adapter = parts.manager.add(packed("a", num_pages=2), None)
    parts.manager.pin(adapter)
    assert not parts.transfers.busy
    for _ in range(4):
        parts.step()
        parts.mover.work()
    parts.transfers.settle()
    assert parts.manager.info(adapter).residency == "device"
    parts.manager.unpin(adapter)
    assert parts.cache.grow(BlockTable(None), 8 * 4, 0.0)


def test_adapter_that_is_unpinned_before_it_came_is_not_brought_later():
    parts = Parts(num_pages=4, prompt=False)
    table = BlockTable(None)
    assert parts.cache.grow(table, 16, 0.0)
    adapter = parts.manager.add(packed("a"), None)
    parts.manager.pin(adapter)
    parts.manager.unpin(adapter)
    parts.cache.release(table, 0.0)
    parts.step()
    assert not parts.transfers.busy


def test_refused_adapter_leaves_nothing_of_what_was_prepared():
    parts = Parts(room_pages=4)
    parts.kept._in_files = True
    parts.manager.add(parts.kept.prepare(packed("a")), None)
    for refused, error in (
        (packed("a", value=2.0), AdapterExistsError),
        (packed("huge", num_pages=5), CapacityError),
    ):
        prepared = parts.kept.prepare(refused)
        with pytest.raises(error):
            parts.manager.add(prepared, None)
    assert (len(parts.kept), len(parts.kept._prepared)) == (1, 0)


def test_refused_adapter_leaves_no_file_for_other_ranks_but_one_that_is_served_stays(tmp_path):
    store = HostStore(tmp_path)
    kept = AdapterStore(store=store, before_removal=lambda: None)
    served = kept.keep(kept.prepare(packed("a")))
    for refused in (packed("a"), packed("b")):
        kept.undo_prepare(kept.prepare(refused))
    assert [file.name for file in tmp_path.iterdir()] == [store.path(served.content_hash).name]


def test_a_refused_load_leaves_no_content_of_the_instance(tmp_path, monkeypatch):
    state = tmp_path / "contents"
    config = EngineConfig(
        model_dir=str(DEMO / "model"), eager=True, num_threads=1, max_loras=1, contents_dir=str(state)
    )
    client = InProcessClient(build_engine(config))

    def load(name: str) -> None:
        client.start_call("load_adapter", name, str(DEMO / "adapters" / name)).result(PATIENCE_S)

    try:
        load("upper")
        with monkeypatch.context() as patch:
            patch.setattr(client.core.adapters.store, "prepare", Mock(side_effect=StorageError("full")))
            with pytest.raises(StorageError, match="full"):
                load("rot13")
        assert len([*state.iterdir()]) == 1
        client.start_call("pin_adapter", "upper", True).result(PATIENCE_S)
        with pytest.raises(CapacityError, match="pinned ones take all"):
            load("rot13")
        assert len([*state.iterdir()]) == 1
    finally:
        client.shut_down()


def test_pins_count_the_adapters_part_of_a_divided_arena():
    """`cache_policy="static"`: KV never gives its part to adapters."""
    adapters = tuple((path.name, str(path)) for path in sorted((DEMO / "adapters").glob("*-r2")))[:3]
    settings = {
        "model_dir": str(DEMO / "model"),
        "adapters": adapters,
        "eager": True,
        "num_threads": 1,
        "max_model_len": 64,
        "cache_policy": "static",
    }
    client = InProcessClient(build_engine(EngineConfig(**settings, arena_mb=64.0)))
    try:
        manager = client.core.adapters
        share = make_caching_policy("static", CacheCosts(page_bytes=1)).traits.adapter_share
        num_pages = max(manager.current(name).num_pages for name, _ in adapters)
        arena_mb = 2.5 * num_pages / share * manager.page_bytes / 1e6
    finally:
        client.shut_down()
    client = InProcessClient(build_engine(EngineConfig(**settings, arena_mb=arena_mb)))
    try:
        first, second, _ = (name for name, _ in adapters)
        client.start_call("pin_adapter", first, True).result(PATIENCE_S)
        with pytest.raises(CapacityError, match="leave no room for a request"):
            client.start_call("pin_adapter", second, True).result(PATIENCE_S)
    finally:
        client.shut_down()


def test_a_file_that_can_not_be_removed_is_logged(tmp_path, caplog):
    store = HostStore(tmp_path)
    store.path("a").mkdir()
    store.remove("a")
    assert "stays on this host" in caplog.text


@pytest.mark.parametrize("settings", [{"max_loras": 1}, {"num_pages": 4, "room_pages": 3}])
def test_pinned_adapter_is_replaced_where_two_do_not_fit(settings):
    parts = Parts(**settings)
    old = parts.manager.add(packed("a", num_pages=2), None)
    parts.manager.pin(old)
    new = parts.manager.add(packed("a", num_pages=2, value=2.0), None, replace=True)
    assert (old.slot, new.slot is None, new.pinned) == (None, False, True)


@pytest.mark.parametrize("settings", [{"max_loras": 1}, {"num_pages": 4, "room_pages": 3}])
def test_pinned_adapter_s_own_requests_delay_its_new_version(settings):
    parts = Parts(**settings)
    old = parts.manager.add(packed("a", num_pages=2), None)
    assert parts.acquire(old)
    parts.manager.pin(old)  # its own requests are in no pin's way
    with pytest.raises(BusyError, match="'a' can't be pinned yet: requests of its former version"):
        parts.manager.add(packed("a", num_pages=2, value=2.0), None, replace=True)
    assert (parts.manager.current("a"), old.pinned, len(parts.kept)) == (old, True, 1)
    parts.manager.release(old)
    assert parts.manager.add(packed("a", num_pages=2, value=2.0), None, replace=True).pinned


def test_the_next_version_of_a_pinned_adapter_is_checked_without_its_content():
    parts = Parts(max_loras=1)
    parts.manager.check_next("a")
    old = parts.manager.add(packed("a"), None)
    assert parts.acquire(old)
    parts.manager.check_next("a")
    parts.manager.pin(old)
    with pytest.raises(BusyError, match="'a' can't be pinned yet"):
        parts.manager.check_next("a")
    parts.manager.release(old)
    parts.manager.check_next("a")
    roomy = Parts(max_loras=2)
    old = roomy.manager.add(packed("a"), None)
    roomy.manager.pin(old)
    assert roomy.acquire(old)
    roomy.manager.check_next("a")


def test_pinned_adapter_stays_pinned_when_its_new_version_is_refused():
    parts = Parts(num_pages=5, room_pages=4)
    old = parts.manager.add(packed("a", num_pages=2), None)
    parts.manager.pin(old)
    with pytest.raises(CapacityError, match="raise arena_mb"):
        parts.manager.add(packed("a", num_pages=5), None, replace=True)
    assert parts.manager.current("a") is old
    assert old.pinned
    assert len(parts.kept) == 1


def test_preloaded_adapters_come_before_a_request_and_count_as_no_visit():
    parts = Parts(max_loras=3)
    a, b = (parts.manager.add(packed(name, num_pages=2), None) for name in "ab")
    assert parts.manager.info(a).device_bytes == 2 * PAGE_BYTES
    assert parts.manager.preload(["a", "gone", "b"]) == 2
    parts.move()
    assert parts.manager.preload(["a"]) == 1
    assert parts.manager.num_preloaded == 2, "what is there is not brought again"
    assert a.slot is not None
    assert b.slot is not None
    assert not a.pinned
    assert visits(parts, a) == 0
    assert (parts.cache.counters.adapter_hits, parts.cache.counters.adapter_misses) == (0, 0)
    assert parts.acquire(a)
    assert (parts.cache.counters.adapter_hits, parts.cache.counters.adapter_misses) == (1, 0)
    parts.manager.release(a)
    parts.manager.remove("b")
    assert "b" not in [one.name for one in parts.manager.versions.values()]  # nothing holds it


def test_preloading_takes_no_room_of_requests_nor_of_what_is_preloaded_too():
    parts = Parts(max_loras=3)
    running, idle, a, b, c = (parts.manager.add(packed(name), None) for name in ("running", "idle", *"abc"))
    for adapter in (running, idle):
        assert parts.acquire(adapter)
    parts.manager.release(idle)
    assert parts.manager.preload(["a", "b", "c"]) == 2
    parts.move()
    assert [one.slot is not None for one in (running, idle, a, b, c)] == [True, False, True, True, False]
    assert parts.manager.preload(["c", "a", "b"]) == 2  # what is there stays
    assert c.slot is None
    parts.manager.release(running)
    assert parts.manager.preload(["c", "a", "b"]) == 3


def test_removal_that_fails_leaves_no_trace_of_the_version():
    parts = Parts()
    parts.manager.add(packed("a"), None)
    forget, dropped = parts.kept.forget, []
    parts.manager.on_drop = dropped.append

    def fail(adapter: PackedAdapter) -> None:
        forget(adapter)
        raise EngineDeadError("rank 1 does not answer")

    parts.kept.forget = fail
    with pytest.raises(EngineDeadError):
        parts.manager.remove("a")
    assert (parts.manager.known(), parts.manager.versions, len(dropped)) == ([], {}, 1)
    parts.manager.clear_history(lambda name: True)


def test_unloaded_sums_leave_no_number():
    parts = Parts()
    for number in range(100):
        parts.manager.add(packed(f"{COMPOSED}{number}"), None)
        parts.manager.remove(f"{COMPOSED}{number}")
    assert not parts.manager._numbers
    parts.manager.add(packed("a"), None)
    parts.manager.remove("a")
    assert parts.manager.add(packed("a"), None).version == 2


def test_the_wait_for_a_failed_load_is_never_negative():
    parts = Parts()
    adapter = parts.manager.add(packed("a"), None)
    parts.manager.failures.by_version[adapter.uid] = Failure("broken", retry_s=10.0)
    parts.manager.to_bring.append(adapter)
    times_s = iter([9.0, 11.0])
    parts.manager._clock = SimpleNamespace(now_s=lambda: next(times_s))
    assert parts.manager.bring_pinned() == 1.0
