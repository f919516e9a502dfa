# SPDX-License-Identifier: Apache-2.0
"""Routing by a table of shares."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.policies.routing.routers import PhiRouting

from .routing_parts import BASE, Instance, Request

INSTANCES = [Instance(index, tokens) for index, tokens in enumerate((30, 20, 10))]
SHARES = st.lists(st.integers(1, 50), min_size=1, max_size=5).map(
    lambda parts: [(index, part / sum(parts)) for index, part in enumerate(parts)]
)


@given(SHARES, st.integers(1, 200))
def test_each_instance_has_its_share_of_any_number_of_requests(row, num_requests):
    router, instances = PhiRouting({"a": row}), [Instance(index) for index in range(5)]
    chosen = Counter(router.choose(Request("a"), instances).index for _ in range(num_requests))
    for index, phi in row:
        assert phi * num_requests - (len(row) - 1) < chosen[index] + 1e-6
        assert chosen[index] < phi * num_requests + 1 + 1e-6


def test_adapters_take_turns_of_their_own():
    router = PhiRouting({"a": [(0, 0.5), (1, 0.5)], "b": [(0, 0.5), (1, 0.5)]})
    names = "aabbab"
    assert [router.choose(Request(name), INSTANCES).index for name in names] == [0, 1, 0, 1, 0, 0]


def test_what_the_table_does_not_know_goes_where_least_is_to_do():
    router = PhiRouting({"a": [(7, 1.0)]})
    assert [router.choose(Request(name), INSTANCES).index for name in ("a", "b", None)] == [2, 2, 2]
    assert PhiRouting().choose(BASE, INSTANCES).index == 2


def test_an_absent_instance_leaves_its_share_to_the_others():
    router = PhiRouting({"a": [(0, 0.5), (1, 0.25), (2, 0.25)]})
    chosen = Counter(router.choose(Request("a"), INSTANCES[1:]).index for _ in range(10))
    assert chosen == {1: 5, 2: 5}


def test_a_swap_counts_from_the_next_request_on_and_rows_that_stay_go_on_in_turn():
    row = [(0, 0.5), (1, 0.5)]
    router = PhiRouting({"a": row, "b": row})
    assert [router.choose(Request(name), INSTANCES).index for name in "ab"] == [0, 0]
    router.swap({"a": row, "b": [(2, 1.0)]})
    assert router.version == 1
    assert [router.choose(Request(name), INSTANCES).index for name in "ab"] == [1, 2]
    assert router.table == {"a": row, "b": [(2, 1.0)]}


@pytest.mark.parametrize("row", [[], [(0, 0.5)], [(0, 1.5), (1, -0.5)], [(0, 0.5), (0, 0.5)]])
def test_a_bad_table_is_refused_and_the_one_before_stays(row):
    router = PhiRouting({"a": [(1, 1.0)]})
    with pytest.raises(ValueError, match="routing of adapter 'a' is"):
        router.swap({"a": row})
    assert (router.version, router.choose(Request("a"), INSTANCES).index) == (0, 1)
