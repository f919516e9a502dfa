# SPDX-License-Identifier: Apache-2.0
"""Who holds adapters, and the order in which copies are made and dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_lora.policies.migration.pool_moves import UNEVEN, copies_to_drop, copies_to_make, place_holders

NAMES = [f"a{number}" for number in range(8)]


@st.composite
def pools(draw):
    """(sizes, held, live, replicas, wanted): holders and wishes may name instances that are gone."""
    sizes = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100), min_size=1))
    live = draw(st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=5))
    places = st.frozensets(st.integers(0, 6), max_size=4)
    held = {name: draw(places) & set(live) for name in sizes}
    wanted = draw(st.none() | st.dictionaries(st.sampled_from(NAMES), places))
    return sizes, held, live, draw(st.integers(1, 3)), wanted


def test_adapters_go_where_least_is_held():
    assert place_holders({"big": 10, "b": 4, "c": 3}, {}, [0, 1], 1) == {
        "big": {0},
        "b": {1},
        "c": {1},
    }


def test_holders_stay_while_the_load_is_even_and_move_to_one_that_joins():
    sizes = dict.fromkeys("abcd", 1)
    held = {"a": [0], "b": [0], "c": [1], "d": [1]}
    assert place_holders(sizes, held, [0, 1], 1) == {name: set(now) for name, now in held.items()}
    target = place_holders(sizes, {key: [0] for key in "abcd"}, [0, 1], 1)
    assert sorted(map(min, target.values())) == [0, 0, 1, 1]


def test_a_placement_decides_and_replicas_add_to_it():
    held = {"a": [2], "b": [2]}
    target = place_holders({"a": 5, "b": 5}, held, [0, 1, 2], 2, {"a": [0], "b": [0, 1, 2]})
    assert target == {"a": {0, 2}, "b": {0, 1, 2}}


def test_copies_of_what_nobody_holds_come_first():
    target = {"a": frozenset({0, 1}), "b": frozenset({1})}
    assert copies_to_make(target, {"a": [0]}) == [("b", 1), ("a", 1)]


def test_nothing_is_dropped_before_all_copies_are_confirmed():
    target = {"a": frozenset({1, 2})}
    assert copies_to_drop(target, {"a": [0, 1]}) == []
    assert copies_to_drop(target, {"a": [0, 1, 2, 3]}) == [("a", 0), ("a", 3)]
    assert copies_to_drop({"a": frozenset()}, {"a": [0]}) == [], "no instance is left to hold it"


@given(pools())
def test_every_adapter_has_its_holders_and_they_are_those_that_are_wanted(pool):
    sizes, held, live, replicas, wanted = pool
    target = place_holders(sizes, held, live, replicas, wanted)
    assert target.keys() == sizes.keys()
    for name, holders in target.items():
        asked = set((wanted or {}).get(name, ())) & set(live)
        assert asked <= holders <= set(live)
        assert len(holders) == max(len(asked), min(replicas, len(live)))
    assert place_holders(sizes, target, live, replicas, wanted) == target, "at rest nothing moves"


@given(pools())
def test_without_a_placement_holdings_are_even_as_far_as_adapters_allow(pool):
    sizes, held, live, replicas, _ = pool
    target = place_holders(sizes, held, live, replicas)
    load = {i: sum(sizes[name] for name, holders in target.items() if i in holders) for i in live}
    full, empty = max(load.values()), min(load.values())
    fullest = max(load, key=lambda i: (load[i], i))
    emptiest = min(load, key=lambda i: (load[i], i))
    movable = [sizes[n] for n, h in target.items() if fullest in h and emptiest not in h and sizes[n]]
    gap = full - empty
    assert gap <= UNEVEN * sum(load.values()) / len(load) or all(2 * size > gap for size in movable)


@given(pools(), st.randoms())
def test_at_no_moment_are_there_fewer_holders_than_before_or_than_asked_for(pool, rng):
    """Copies are confirmed in any order, some fail; drops happen whenever they are allowed."""
    sizes, start, live, replicas, wanted = pool
    target = place_holders(sizes, start, live, replicas, wanted)
    now = {name: set(holders) for name, holders in start.items()}
    least = {name: min(len(start[name]), replicas, len(live)) for name in sizes}
    failing = rng.random() < 0.5
    for _ in range(40):
        moves = copies_to_make(target, now)
        if moves:
            name, instance = rng.choice(moves)
            if not (failing and rng.random() < 0.5):
                now[name].add(instance)
        if rng.random() < 0.5:
            for name, instance in copies_to_drop(target, now):
                now[name].remove(instance)
                assert len(now[name]) >= min(replicas, len(live))
        assert all(len(now[name]) >= least[name] for name in sizes)
    if not failing:
        for name, instance in copies_to_drop(target, now):
            now[name].remove(instance)
        assert now == target
