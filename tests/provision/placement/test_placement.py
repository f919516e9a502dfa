# SPDX-License-Identifier: Apache-2.0
"""LoRAServe's Algorithm 1, its budgets, and the placements it is compared with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config import PLACEMENTS as PLACEMENT_NAMES
from moe_lora.provision.placement.placement import (
    PLACEMENTS,
    contiguous_placement,
    disjoint_placement,
    place_adapters,
    place_by_rank,
    random_placement,
    replicate_everywhere,
)
from moe_lora.provision.placement.placement_problem import (
    operating_point,
    placement_problem,
    placement_quality,
)

from .placement_cases import POINTS, Case, assert_whole, cases, flatten

EQUAL = {8: 100.0, 128: 100.0}


def test_each_rank_gets_servers_by_its_load_and_heavy_adapters_are_split():
    # Loads 1.5, 0.5 (rank 8) and 1.0 (rank 128): target 1, two servers and one.
    found = place_by_rank({"a": 8, "b": 8, "c": 128}, [0, 1, 2], EQUAL, {"a": 150.0, "b": 50.0, "c": 100.0})
    assert found.target_utilisation == pytest.approx(1.0)
    assert (found.rank_budgets, found.overshoot) == ({8: 2, 128: 1}, 0)
    assert found.table["c"] == [(0, 1.0)]
    assert dict(found.table["a"]) == pytest.approx({1: 2 / 3, 2: 1 / 3})
    assert found.table["b"] == [(2, 1.0)]


def test_leftovers_go_beside_the_highest_rank_where_there_is_room():
    # Rank 16 has load 0.2 of a target of 1: no server of its own; rank 128's server has room for it.
    points = {8: 100.0, 16: 100.0, 128: 100.0}
    demand = {"a": 100.0, "b": 100.0, "c": 20.0, "d": 80.0}
    found = place_by_rank({"a": 8, "b": 8, "c": 16, "d": 128}, ["x", "y", "z"], points, demand)
    assert found.rank_budgets == {8: 2, 16: 0, 128: 1}
    assert found.table["c"] == found.table["d"] == [("x", 1.0)]


def test_servers_that_rounding_gave_out_twice_are_taken_back_from_the_lowest_rank():
    # Loads 1.5 and 1.5 (two ranks) of target 1 on 3 servers: round gives 2 + 2.
    found = place_by_rank({"a": 8, "b": 128}, [0, 1, 2], EQUAL, {"a": 150.0, "b": 150.0})
    assert (found.rank_budgets, found.overshoot) == ({8: 1, 128: 2}, 1)


def test_servers_that_rounding_forgot_go_to_the_highest_of_the_ranks_rounded_down():
    points = dict.fromkeys((8, 16, 32, 64, 128), 100.0)
    adapters = {str(rank): rank for rank in points}
    found = place_by_rank(adapters, [0, 1], points, dict.fromkeys(adapters, 40.0))
    assert found.overshoot == -2
    assert found.rank_budgets == {8: 0, 16: 0, 32: 0, 64: 1, 128: 1}


def test_points_between_are_interpolated_in_the_time_of_a_token():
    assert operating_point({8: 100.0, 24: 50.0}, 16) == pytest.approx(1 / 0.015)
    assert [operating_point({8: 100.0, 24: 50.0}, rank) for rank in (4, 32)] == [100.0, 50.0]


def test_a_rank_outside_of_the_points_is_placed_and_named_once(caplog):
    adapters, points = {"a": 16, "tiny": 4}, {8: 100.0, 64: 80.0}
    for _ in range(2):
        assert place_adapters(adapters, [0, 1], points, {"a": 10.0, "tiny": 5.0}).keys() == adapters.keys()
    assert caplog.text.count("adapter 'tiny': rank 4 is outside of the operating points, 8 to 64") == 1


def test_a_point_above_that_of_a_smaller_rank_counts_as_that():
    problem = placement_problem({"a": 8, "b": 16}, [0], {8: 100.0, 16: 130.0}, {})
    assert problem.tokens_per_s == {8: 100.0, 16: 100.0}


@given(cases(), st.sampled_from(sorted(PLACEMENTS)))
def test_every_adapter_has_its_whole_demand_placed(case, name):
    assert_whole(PLACEMENTS[name](*case.arguments), case)


@given(cases(), cases(), st.sampled_from(sorted(PLACEMENTS)))
def test_a_previous_table_of_other_adapters_and_servers_does_no_harm(case, other, name):
    previous = PLACEMENTS[name](*other.arguments)
    assert_whole(PLACEMENTS[name](*case.arguments, previous), case)


@given(cases(), st.sampled_from(sorted(PLACEMENTS)))
def test_nothing_moves_while_the_demand_stays(case, name):
    table = PLACEMENTS[name](*case.arguments)
    again = PLACEMENTS[name](*case.arguments, table)
    assert flatten(again, case) == flatten(table, case)
    assert placement_quality(again, *case.arguments, previous=table).num_copies == 0


@given(cases(), st.randoms(use_true_random=False), st.sampled_from(["loraserve", "optimal", "everywhere"]))
def test_names_and_their_order_change_nothing(case, rng, name):
    names = list(case.adapters)
    new = dict(zip(names, rng.sample(names, len(names)), strict=True))
    order = rng.sample(names, len(names))
    renamed = Case(
        {new[one]: case.adapters[one] for one in order},
        case.servers,
        {new[one]: case.demand[one] for one in order},
    )
    place = PLACEMENTS[name]
    assert flatten(place(*renamed.arguments), renamed) == flatten(place(*case.arguments), case)


@given(cases())
def test_a_server_has_at_most_the_target_and_what_its_own_rank_or_one_leftover_adds(case):
    found = place_by_rank(*case.arguments)
    quality = placement_quality(found.table, *case.arguments)
    problem = placement_problem(*case.arguments)
    ranks_without_room = sum(1 for _ in found.rank_budgets)
    # A leftover that fits nowhere goes to the least used server, which has less than the target.
    assert quality.worst_load <= problem.target_utilisation + max(problem.load) + 1e-9
    assert sum(found.rank_budgets.values()) in (0, len(case.servers))
    assert abs(found.overshoot) <= ranks_without_room


def test_baselines_are_those_of_the_paper():
    adapters = {f"a{index}": rank for index, rank in enumerate((128, 8, 64, 8))}
    demand = dict.fromkeys(adapters, 1.0)
    assert contiguous_placement(adapters, [0, 1], POINTS, demand) == {
        "a0": [(1, 1.0)],
        "a1": [(0, 1.0)],
        "a2": [(1, 1.0)],
        "a3": [(0, 1.0)],
    }
    assert replicate_everywhere(adapters, [5, 6], POINTS, demand)["a2"] == [(5, 0.5), (6, 0.5)]
    many = {f"a{index}": 8 for index in range(400)}
    table = random_placement(many, [0, 1], POINTS, {})
    assert 150 < sum(row == [(0, 1.0)] for row in table.values()) < 250
    assert random_placement(many, [0, 1], POINTS, {}, seed=1) != table


def test_without_any_demand_adapters_are_spread_by_number():
    adapters = {f"a{index}": 8 if index < 6 else 128 for index in range(12)}
    for name in ("loraserve", "optimal"):
        table = PLACEMENTS[name](adapters, [0, 1, 2], POINTS, {})
        assert placement_quality(table, adapters, [0, 1, 2], POINTS, {}).most_held == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": 8}, [], POINTS, {}), "servers is empty; name at least one"),
        (({"a": 8}, [0, 0], POINTS, {}), "names one twice"),
        (({"a": 8}, [0], {}, {}), "operating_points is empty"),
        (({"a": 8}, [0], {8: 0.0}, {}), "tokens/s positive and finite"),
        (({"a": 0}, [0], POINTS, {}), "a rank is a whole number >= 1"),
        (({"a": 8}, [0], POINTS, {"a": -1.0}), "must be a finite number >= 0"),
        (({"a": 8}, [0], POINTS, {"a": float("nan")}), "must be a finite number >= 0"),
        (({"a": 8}, [0], POINTS, {"b": 1.0}), "'b', which is not among the adapters"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        place_adapters(*arguments)


def test_settings_name_every_placement():
    assert tuple(PLACEMENTS) == PLACEMENT_NAMES


def test_no_adapter_needs_no_place():
    assert all(place({}, [0, 1], POINTS, {}) == {} for place in PLACEMENTS.values())


def test_disjoint_subsets_take_the_heaviest_adapter_first():
    adapters = dict.fromkeys("abcde", 8)
    demand = {"a": 50.0, "b": 40.0, "c": 30.0, "d": 30.0, "e": 10.0}
    table = disjoint_placement(adapters, ["x", "y"], EQUAL, demand)
    assert table == {name: [(server, 1.0)] for name, server in zip("abcde", "xyyxy", strict=True)}


def test_disjoint_subsets_keep_their_servers_when_the_heaviest_adapter_changes():
    adapters = {"a": 8, "b": 8}
    table = disjoint_placement(adapters, ["x", "y"], EQUAL, {"a": 50.0, "b": 40.0})
    assert table == {"a": [("x", 1.0)], "b": [("y", 1.0)]}
    assert disjoint_placement(adapters, ["x", "y"], EQUAL, {"a": 50.0, "b": 60.0}, table) == table
