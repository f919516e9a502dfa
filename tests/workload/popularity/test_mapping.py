# SPDX-License-Identifier: Apache-2.0
"""A trace's identities mapped to adapters: dLoRA's round robin in blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.workload.popularity.functions import map_adapters, map_identities, mapped_popularity
from moe_lora.workload.traces.records import Trace, TraceRequest


def test_identities_go_round_robin_in_blocks() -> None:
    counts = {f"f{i}": 10 - i for i in range(7)}
    assert list(map_identities(counts, ["x", "y"], 1).values()) == [0, 1, 0, 1, 0, 1, 0]
    assert list(map_identities(counts, ["x", "y"], 2).values()) == [0, 0, 1, 1, 0, 0, 1]
    assert list(map_identities(counts, ["x", "y"], 10).values()) == [0] * 7


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 1000), min_size=4, max_size=40),
    num_adapters=st.integers(1, 5),
    skewness=st.integers(1, 50),
)
def test_mapping_keeps_blocks_together_and_gives_the_first_adapter_the_most(
    counts: list[int], num_adapters: int, skewness: int
) -> None:
    named = {f"f{i}": count for i, count in enumerate(counts)}
    mapping = map_identities(named, [f"a{i}" for i in range(num_adapters)], skewness)
    load = Counter[int]()
    for name, index in mapping.items():
        load[index] += named[name]
    assert load.total() == sum(counts)
    assert max(load.values()) == load[0]


def test_most_frequent_come_first_and_ties_go_by_name() -> None:
    assert map_identities({"b": 1, "a": 1, "c": 5}, ["x", "y", "z"]) == {"c": 0, "a": 1, "b": 2}


def test_popularity_is_what_the_mapped_identities_add_up_to() -> None:
    counts = {"f": 5, "g": 3, "h": 2}
    assert mapped_popularity(counts, ["x", "y"]).probabilities == pytest.approx((0.7, 0.3))
    assert mapped_popularity(counts, ["x", "y"], 2).probabilities == pytest.approx((0.8, 0.2))


def test_trace_asks_for_the_adapters_its_names_map_to() -> None:
    asked = ["koala", "vicuna", None, "vicuna", "llama"]
    trace = Trace("t", "own", tuple(TraceRequest(float(i), 1, 1, adapter=a) for i, a in enumerate(asked)))
    assert [r.adapter for r in map_adapters(trace, ["x", "y"]).requests] == ["y", "x", None, "x", "x"]
    assert [r.adapter for r in map_adapters(trace, ["x", "y"], 2).requests] == ["x", "x", None, "x", "y"]


def test_mapping_that_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="skewness=0"):
        map_identities({"f": 1}, ["x"], 0)
    with pytest.raises(ValueError, match="no adapter"):
        map_identities({"f": 1}, [])
    with pytest.raises(ValueError, match="names no adapter"):
        map_adapters(Trace("t", "own", (TraceRequest(0.0, 1, 1),)), ["x"])
