from __future__ import annotations

import pytest
import torch

from moe_lora.cache.blocks import BlockTable
from moe_lora.core.errors import AdapterExistsError, AdapterNotFoundError, CapacityError

from .parts import PAGE_BYTES, Parts, packed


def test_adapter_lies_in_the_arena_where_its_slot_says():
    parts = Parts()
    adapter = parts.residency.add(packed("a", num_pages=2, value=3.0), None)
    assert parts.residency.acquire(adapter)
    offset = int(parts.slots.a_offset[adapter.slot, 0, 0])
    assert parts.arena[offset : offset + 2 * PAGE_BYTES].view(torch.float32).eq(3.0).all()
    assert parts.slots.lora_rank[adapter.slot, 0, 0] == 1
    assert adapter.info().residency == "device"


def test_idle_adapter_makes_room_and_running_one_does_not():
    parts = Parts(max_loras=1)
    a, b = (parts.residency.add(packed(name), None) for name in "ab")
    assert parts.residency.acquire(a)
    assert not parts.residency.acquire(b)
    parts.residency.release(a)
    assert parts.residency.acquire(b)
    assert a.slot is None
    assert parts.placement.num_evictions == 1


def test_several_idle_adapters_leave_for_a_large_one():
    parts = Parts(kv_pages=1, lora_pages=3, max_loras=4)
    small = [parts.residency.add(packed(name), None) for name in "abc"]
    for adapter in small:
        parts.residency.acquire(adapter)
        parts.residency.release(adapter)
    large = parts.residency.add(packed("large", num_pages=3), None)
    assert parts.residency.acquire(large)
    assert [adapter.slot for adapter in small] == [None, None, None]


def test_idle_adapters_leave_kv_the_pages_it_was_promised():
    parts = Parts(kv_pages=4, lora_pages=2, max_loras=4)
    for name in "abc":
        adapter = parts.residency.add(packed(name, num_pages=2), None)
        assert parts.residency.acquire(adapter)
        parts.residency.release(adapter)
    parts.add("base", range(14))
    assert parts.step() == {"base": 14}


def test_adapter_that_running_ones_leave_no_room_for_drives_nobody_out():
    parts = Parts(kv_pages=4, lora_pages=4, max_loras=4)
    idle, pinned, large = (
        parts.residency.add(packed(name, num_pages), None)
        for name, num_pages in (("idle", 1), ("pinned", 2), ("large", 3))
    )
    for adapter in (idle, pinned):
        assert parts.residency.acquire(adapter)
    parts.residency.release(idle)
    assert not parts.residency.acquire(large)
    assert idle.slot is not None


def test_adapter_waits_for_a_run_of_pages_where_kv_and_running_ones_leave_gaps():
    parts = Parts(kv_pages=4, lora_pages=4, max_loras=4)
    table = BlockTable(0)
    assert parts.blocks.grow(table, 16)
    first, gap, last = (parts.residency.add(packed(name), None) for name in ("first", "gap", "last"))
    for adapter in (first, gap, last):
        assert parts.residency.acquire(adapter)
    parts.residency.release(gap)
    parts.residency.remove("gap")
    wide = parts.residency.add(packed("wide", num_pages=2), None)
    assert not parts.residency.acquire(wide)
    assert parts.pages.num_free == 2
    parts.blocks.release(table)
    assert parts.residency.acquire(wide)


def test_failed_attempt_leaves_no_page_taken():
    parts = Parts(kv_pages=1, lora_pages=3, max_loras=4)
    assert parts.blocks.grow(BlockTable(0), 1)
    pinned = parts.residency.add(packed("pinned"), None)
    parts.residency.acquire(pinned)
    large = parts.residency.add(packed("large", num_pages=3), None)
    assert parts.pages.num_free == 2
    assert not parts.residency.acquire(large)
    assert parts.pages.num_free == 2
    assert large.slot is None


def test_new_version_serves_new_requests_while_the_old_one_finishes():
    parts = Parts()
    old = parts.residency.add(packed("a", value=1.0), None)
    parts.residency.acquire(old)
    new = parts.residency.add(packed("a", value=2.0), None, replace=True)
    assert parts.residency.current("a") is new
    assert new.version == 2
    assert old.slot is not None
    parts.residency.release(old)
    assert old.slot is None


def test_removed_adapter_is_unknown_and_its_pages_are_free():
    parts = Parts()
    adapter = parts.residency.add(packed("a", num_pages=2), None)
    free = parts.pages.num_free
    parts.residency.acquire(adapter)
    parts.residency.release(adapter)
    parts.residency.remove("a")
    assert parts.pages.num_free == free
    with pytest.raises(AdapterNotFoundError, match="'a' is not loaded"):
        parts.residency.current("a")


def test_taken_name_and_impossible_size_are_refused():
    parts = Parts(lora_pages=4)
    parts.residency.add(packed("a"), None)
    with pytest.raises(AdapterExistsError, match="'a' is already loaded"):
        parts.residency.add(packed("a"), None)
    with pytest.raises(CapacityError, match="raise lora_memory_gb"):
        parts.residency.add(packed("huge", num_pages=5), None)
