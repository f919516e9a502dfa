# SPDX-License-Identifier: Apache-2.0
"""Which adapters dLoRA's greedy preloads where: by hand, and what holds for any loads."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.provision.placement.burst_tolerance import (
    DeviceMemory,
    place_and_preload,
    place_by_burst_tolerance,
    preload,
)


def memory(free: list[float], sizes: dict[str, float], request: float = 1.0) -> DeviceMemory:
    return DeviceMemory(free_bytes=dict(enumerate(free)), adapter_bytes=sizes, request_bytes=request)


def burst_tolerance(
    loads: dict[str, float], held: dict[str, list[int]], memory: DeviceMemory
) -> dict[str, float]:
    """Requests within the unallocated memory of an adapter's servers, over its load; inf without load."""
    free = dict(memory.free_bytes)
    for name, servers in held.items():
        for server in servers:
            free[server] -= memory.adapter_bytes[name]
    return {
        name: math.fsum(free[server] for server in held[name]) / (memory.request_bytes * load)
        if load
        else math.inf
        for name, load in loads.items()
    }


def test_the_greedy_by_hand() -> None:
    """Two servers of 10, adapters of 1, a asked for four times as often as b.

    a to 0 (b still has nothing: the lowest stays 0), b to 1: 9/4 and 9/1.  a also to 1: (9 + 8)/4, b 8/1.
    b, with 8, is no longer lowest, and a is everywhere: over.
    """
    room = memory([10, 10], {"a": 1, "b": 1})
    loads = {"a": 4.0, "b": 1.0}
    held = preload(loads, room)
    assert held == {"a": [0, 1], "b": [1]}
    assert burst_tolerance(loads, held, room) == {"a": (9 + 8) / 4, "b": 8.0}


def test_it_ends_before_the_lowest_tolerance_falls() -> None:
    """Copies that take more memory than they bring requests: a on 1 would leave b with 2/1 < 6/2."""
    room = memory([10, 10], {"a": 4, "b": 4})
    loads = {"a": 2.0, "b": 1.0}
    held = preload(loads, room)
    assert held == {"a": [0], "b": [1]}
    assert burst_tolerance(loads, held, room) == {"a": 3.0, "b": 6.0}


def test_what_does_not_fit_or_has_no_load_is_not_preloaded() -> None:
    assert preload({"a": 1.0, "b": 0.0}, memory([3], {"a": 4, "b": 1})) == {"a": [], "b": []}
    with pytest.raises(ValueError, match="load of adapter 'a'"):
        preload({"a": -1.0}, memory([3], {"a": 1}))


def test_as_a_placement_rows_are_shared_evenly_and_everybody_has_one() -> None:
    table, _ = place_and_preload("abc", {"a": 4.0, "b": 1.0}, memory([10, 10], dict.fromkeys("abc", 1)))
    assert table == {"a": [(0, 0.5), (1, 0.5)], "b": [(1, 1.0)], "c": [(0, 1.0)]}
    assert set(place_by_burst_tolerance({"a": 8, "b": 8}, [0, 1], {}, {})) == {"a", "b"}


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 100), min_size=1),
    st.lists(st.floats(1, 50), min_size=1, max_size=4),
    st.floats(0.1, 5),
)
def test_memory_suffices_and_no_single_copy_would_raise_the_lowest(loads, free, size) -> None:
    sizes = dict.fromkeys(loads, size)
    room = memory(free, sizes)
    held = preload(loads, room)
    used = [sum(size for row in held.values() if server in row) for server in range(len(free))]
    assert all(here <= there + 1e-9 for here, there in zip(used, free, strict=True))
    tolerances = burst_tolerance(loads, held, room)
    lowest = min(tolerances.values())
    most_free = [there - here for here, there in zip(used, free, strict=True)]
    name = min(sorted(tolerances), key=tolerances.__getitem__)
    candidates = [s for s in range(len(free)) if s not in held[name] and most_free[s] >= size]
    if candidates:
        server = max(candidates, key=most_free.__getitem__)
        more = held | {name: [*held[name], server]}
        assert min(burst_tolerance(loads, more, room).values()) <= lowest + 1e-6


def test_no_server_is_to_hold_more_adapters_than_it_has_slots() -> None:
    room = DeviceMemory(free_bytes={0: 10, 1: 10}, adapter_bytes=dict.fromkeys("abc", 1), max_adapters=1)
    assert preload({"a": 3.0, "b": 2.0, "c": 1.0}, room) == {"a": [0], "b": [1], "c": []}
    table, preloaded = place_and_preload("abc", {"a": 1.0, "b": 2.0, "c": 3.0}, room)
    assert preloaded == {0: ["a"], 1: ["b"]}
    assert set(table) == {"a", "b", "c"}
