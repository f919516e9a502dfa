# SPDX-License-Identifier: Apache-2.0
"""The optimising placement, against an exact solver and its own bounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.placement.placement_exact import exact_worst_load
from moe_lora.provision.placement.optimal import optimal_placement
from moe_lora.provision.placement.placement import PLACEMENTS, place_adapters
from moe_lora.provision.placement.placement_problem import placement_problem, placement_quality

from .placement_cases import POINTS, Case, assert_whole, cases, flatten


def optimal(*case, padded=True, adapter_bytes=None, **options):
    """`optimal_placement` of a case, with a previous table as the fifth argument.

    padded: a server's tokens count at its highest rank; False: at their own.
    """
    problem = placement_problem(*case[:4], adapter_bytes)
    problem = problem if padded else problem.without_padding()
    return optimal_placement(problem, problem.shares(case[4] if len(case) > 4 else None), **options)


SMALL = cases(max_adapters=5, max_servers=3, ranks=(8, 64, 128), least_demand=1.0)


def test_ranks_are_kept_apart_where_padding_costs_more_than_uneven_loads():
    # Ranks 8 (load 1.2) and 64 (load 0.8) on two servers: apart 1.2; to even it out by padding would not pay.
    points = {8: 100.0, 64: 50.0}
    found = optimal({"a": 8, "b": 64}, [0, 1], points, {"a": 120.0, "b": 40.0})
    assert found.target_utilisation == pytest.approx(1.0)
    # Moving x tokens of rank 8 to the other server: (120 - x) / 100 = (40 + x) / 50, x = 40 / 3.
    assert found.optimum == found.worst_load == pytest.approx((120 - 40 / 3) / 100)
    alone = optimal({"a": 8, "b": 64}, [0, 1], points, {"a": 120.0, "b": 40.0}, padded=False)
    assert alone.worst_load == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(SMALL)
def test_the_worst_load_is_what_an_exact_solver_finds(case):
    found = optimal(*case.arguments)
    assert found.worst_load == pytest.approx(exact_worst_load(*case.arguments), rel=1e-5)


@given(cases(least_demand=1.0))
def test_the_worst_load_is_the_least_over_all_choices_of_highest_ranks(case):
    problem = placement_problem(*case.arguments)
    tokens = {r: float(problem.demand[problem.ranks == r].sum()) for r in problem.tokens_per_s}
    ranks = sorted(tokens)

    def load(caps):
        ratios = []
        for rank in ranks:
            room = sum(problem.tokens_per_s[cap] for cap in caps if cap >= rank)
            wanted = sum(tokens[one] for one in ranks if one >= rank)
            ratios.append(wanted / room if room else float("inf"))
        return max(ratios)

    best = min(map(load, itertools.combinations_with_replacement(ranks, len(case.servers))))
    found = optimal(*case.arguments)
    assert found.optimum == pytest.approx(best, rel=1e-6)
    assert found.worst_load == pytest.approx(best, rel=1e-6)


@given(cases(least_demand=1.0), st.booleans())
def test_the_optimum_is_within_the_stated_factor_of_the_linear_bound(case, padded):
    found = optimal(*case.arguments, padded=padded)
    num_servers, num_ranks = len(case.servers), len(set(case.adapters.values()))
    points = [POINTS[rank] for rank in case.adapters.values()]
    factor = max(points) / min(points)
    if num_servers >= num_ranks:
        factor = min(factor, num_servers / (num_servers - num_ranks + 1))
    assert found.target_utilisation * (1 - 1e-9) <= found.worst_load
    assert found.worst_load <= found.target_utilisation * (1 if not padded else factor) * (1 + 1e-6)


@given(cases())
def test_no_placement_has_a_lighter_worst_server(case):
    optimum = optimal(*case.arguments).worst_load
    for place in PLACEMENTS.values():
        quality = placement_quality(place(*case.arguments), *case.arguments)
        assert optimum <= quality.worst_padded_load * (1 + 1e-6)


@given(cases(), cases(), st.sampled_from([0.0, 0.05, 1.0]))
def test_slack_is_kept_to_from_any_previous_table(case, other, slack):
    previous = place_adapters(*other.arguments)
    found = optimal(*case.arguments, previous, slack=slack)
    assert_whole(found.table, case)
    assert found.worst_load <= found.optimum * (1 + slack) * (1 + 1e-6)
    quality = placement_quality(found.table, *case.arguments, previous=previous)
    assert quality.worst_padded_load == pytest.approx(found.worst_load)
    assert quality.copied_bytes == found.copied_bytes


@given(cases(), st.data(), st.booleans())
def test_a_bound_on_bytes_is_kept_and_nothing_gets_worse(case, data, padded):
    servers = case.servers
    previous = {name: [(data.draw(st.sampled_from(servers)), 1.0)] for name in case.adapters}
    bound = data.draw(st.integers(0, 400))
    found = optimal(*case.arguments, previous, max_copied_bytes=bound, padded=padded)
    assert_whole(found.table, case)
    assert found.copied_bytes <= bound
    before = placement_quality(previous, *case.arguments)
    assert found.worst_load <= (before.worst_padded_load if padded else before.worst_load) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(SMALL, st.data())
def test_no_bounded_placement_beats_the_exact_solver(case, data):
    previous = {name: [(data.draw(st.sampled_from(case.servers)), 1.0)] for name in case.adapters}
    bound = data.draw(st.integers(0, 300))
    found = optimal(*case.arguments, previous, max_copied_bytes=bound)
    exact = exact_worst_load(*case.arguments, previous, max_copied_bytes=bound)
    assert exact <= found.worst_load * (1 + 1e-5)


def test_without_a_copy_nothing_moves_but_shares():
    previous = {"a": [(0, 0.5), (1, 0.5)], "b": [(0, 1.0)]}
    case = Case({"a": 8, "b": 8}, [0, 1], {"a": 100.0, "b": 100.0})
    found = optimal(*case.arguments, previous, max_copied_bytes=0)
    assert found.table == {"a": [(1, 1.0)], "b": [(0, 1.0)]}


@given(cases())
def test_a_table_within_the_slack_stays_as_it_is(case):
    table = optimal(*case.arguments).table
    demand = {name: value * 1.001 for name, value in case.demand.items()}
    again = optimal(case.adapters, case.servers, POINTS, demand, table, slack=0.05)
    assert flatten(again.table, case) == flatten(table, case)


def test_bad_settings_are_refused():
    for setting, message in (
        ({"slack": -0.1}, "slack=-0.1"),
        ({"max_copied_bytes": -1}, "max_copied_bytes=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            optimal({"a": 8}, [0], POINTS, {}, **setting)
    with pytest.raises(ValueError, match="adapter_bytes has no 'a'"):
        optimal({"a": 8}, [0], POINTS, {}, adapter_bytes={})
