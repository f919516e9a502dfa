# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.policies.routing.routing import LeastOutstanding, RoundRobin
from moe_lora.provision.placement.placement import balanced_assignment


@dataclass
class Instance:
    index: int
    outstanding_tokens: int = 0


@dataclass
class Request:
    adapter: str | None = None


BASE = Request()
INSTANCES = st.lists(st.integers(0, 100), min_size=1, max_size=6).map(
    lambda work: [Instance(index, tokens) for index, tokens in enumerate(work)]
)
LOADS = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 50), max_size=7)


def test_shortest_queue_is_joined_the_first_of_equal_ones():
    instances = [Instance(0, 7), Instance(1, 3), Instance(2, 3)]
    assert LeastOutstanding().choose(BASE, instances).index == 1


@given(INSTANCES)
def test_no_instance_has_less_to_do_than_the_one_joined(instances):
    chosen = LeastOutstanding().choose(BASE, instances)
    assert chosen.outstanding_tokens == min(one.outstanding_tokens for one in instances)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4))
def test_joining_the_shortest_queue_keeps_queues_within_one_request(lengths, num_instances):
    instances = [Instance(index) for index in range(num_instances)]
    for tokens in lengths:
        LeastOutstanding().choose(BASE, instances).outstanding_tokens += tokens
    work = [one.outstanding_tokens for one in instances]
    assert max(work) - min(work) <= max(lengths)


def test_turns_are_taken_and_an_absent_instance_is_passed_over():
    router, instances = RoundRobin(), [Instance(0), Instance(1), Instance(2)]
    assert [router.choose(BASE, instances).index for _ in range(4)] == [0, 1, 2, 0]
    assert [router.choose(BASE, instances[::2]).index for _ in range(3)] == [2, 0, 2]
    assert router.choose(BASE, instances[:1]).index == 0


@given(st.integers(1, 6), st.integers(1, 30))
def test_turns_are_fair(num_instances, num_requests):
    router, instances = RoundRobin(), [Instance(index) for index in range(num_instances)]
    counts = Counter(router.choose(BASE, instances).index for _ in range(num_requests))
    assert max(counts.values()) - min(counts[one.index] for one in instances) <= 1


def test_adapters_go_to_their_instance_and_the_rest_where_least_is_to_do():
    router = PhiRouting({"a": [(0, 1.0)], "b": [(1, 1.0)]})
    instances = [Instance(0, 9), Instance(1, 8), Instance(2, 1)]
    chosen = [router.choose(Request(name), instances).index for name in ("a", "b", "unassigned", None)]
    assert chosen == [0, 1, 2, 2]


def test_adapter_whose_instance_is_absent_goes_where_least_is_to_do():
    router = PhiRouting({"a": [(1, 1.0)]})
    assert router.choose(Request("a"), [Instance(0, 5), Instance(2, 4)]).index == 2


def test_heaviest_first_balances():
    loads = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 3}
    # a to 0 and b to 1; c to 1 (7), d to 0 (8), e to 1 (10): the best would be 9 and 9.
    assert balanced_assignment(loads, 2) == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}


def test_adapters_of_unknown_load_are_spread_by_number():
    assert sorted(balanced_assignment(dict.fromkeys("abcd", 0.0), 2).values()) == [0, 0, 1, 1]


@given(LOADS, st.integers(1, 3))
def test_balance_is_within_grahams_bound_of_the_best(loads, num_instances):
    assignment = balanced_assignment(loads, num_instances)
    assert assignment.keys() == loads.keys()

    def heaviest(indices) -> float:
        work = Counter()
        for load, index in zip(loads.values(), indices, strict=True):
            work[index] += load
        return max(work.values(), default=0)

    best = min(heaviest(indices) for indices in itertools.product(range(num_instances), repeat=len(loads)))
    given_load = heaviest([assignment[name] for name in loads])
    assert given_load * 3 * num_instances <= best * (4 * num_instances - 1)


@given(LOADS, st.integers(1, 4), st.randoms())
def test_assignment_does_not_depend_on_the_order_of_adapters(loads, num_instances, rng):
    names = list(loads)
    rng.shuffle(names)
    shuffled = {name: loads[name] for name in names}
    assert balanced_assignment(shuffled, num_instances) == balanced_assignment(loads, num_instances)


@pytest.mark.parametrize(
    ("loads", "num_instances", "message"),
    [({}, 0, "num_instances=0"), ({"a": -1.0}, 1, "'a' is -1"), ({"a": float("nan")}, 1, "'a' is nan")],
)
def test_what_cannot_be_balanced_is_refused(loads, num_instances, message):
    with pytest.raises(ValueError, match=message):
        balanced_assignment(loads, num_instances)
