# SPDX-License-Identifier: Apache-2.0
"""The co-migration problem, solved exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from moe_lora.policies.migration.problem import (
    AdapterSize,
    MigrationProblem,
    Placement,
    ReplicaView,
    RequestView,
    swapped_bytes,
)
from moe_lora.policies.migration.programs import plan_exact
from tests.policies.migration_cases import check_plan, problems

A, B = AdapterSize("a", 10.0), AdapterSize("b", 10.0)


def two(*requests: RequestView, **settings: float) -> MigrationProblem:
    """Replica x holds a and b, y holds b; each has 100 bytes."""
    replicas = [ReplicaView("x", 100.0, 50.0, {"a", "b"}), ReplicaView("y", 100.0, 50.0, {"b"})]
    return MigrationProblem(replicas, requests, [A, B], swap_bytes_per_s=10.0, **settings)


def test_half_of_equal_requests_go_to_the_empty_replica_with_their_adapter():
    plan = plan_exact(two(*(RequestView(i, "a", "x", 5.0, 1.0) for i in range(6))))
    assert (plan.objective_before, plan.objective) == (6.0, 3.0)
    assert len(plan.moves) == 3
    assert all(move[1:] == ("x", "y") for move in plan.moves)
    assert plan.loads == (("a", "y"),)
    assert plan.bound == pytest.approx(3.0)


def test_the_move_factor_counts_at_the_target_only():
    requests = [RequestView(i, None, "x", 5.0, 1.0, 3.0) for i in range(4)]
    plan = plan_exact(two(*requests))
    assert (plan.objective, len(plan.moves)) == (3.0, 1)
    assert plan_exact(two(*(replace(one, move_factor=4.0) for one in requests))).moves == ()


def test_an_adapter_more_costs_its_affinity_and_its_load():
    mixed = [RequestView(i, name, "x", 5.0, 1.0) for i, name in enumerate("abab")]
    plan = plan_exact(two(*mixed, affinity_s=1.0))
    assert plan.objective == pytest.approx(3.0)
    assert {mixed[move[0]].adapter for move in plan.moves} in ({"a"}, {"b"})
    requests = [RequestView(i, "a", "x", 5.0, 1.0) for i in range(4)]
    problem = replace(two(*requests), adapters=[replace(A, load_s=1.5), B])
    plan = plan_exact(problem)
    assert plan.objective == pytest.approx(3.0)
    assert len(plan.moves) == 1


def test_what_has_no_room_on_the_device_is_swapped_or_goes():
    # 2 x 45 + 10 fill x; the third goes to its host, 45 bytes at 10/s, or to y.
    requests = [RequestView(i, "b", "x", 45.0, 1.0) for i in range(3)]
    problem = two(*requests)
    assert Placement(problem).cost(0) == (0.0, 3.0 + 4.5)
    plan = plan_exact(problem)
    assert plan.objective == pytest.approx(2.0)
    assert plan.loads == ()


def test_what_fits_neither_device_nor_host_has_to_go():
    requests = [RequestView(i, "b", "x", 45.0, 1.0, 100.0) for i in range(4)]
    plan = plan_exact(two(*requests))
    assert plan.objective_before == math.inf
    assert plan.objective == pytest.approx(100.0)
    assert len(plan.moves) == 1


def test_nothing_moves_where_no_placement_fits():
    plan = plan_exact(two(*(RequestView(i, "b", "x", 60.0, 1.0) for i in range(4))))
    assert plan.moves == ()
    assert plan.objective == math.inf


def test_those_that_wait_move_before_those_that_run():
    running = [RequestView(i, None, "x", 1.0, 4.0, 1.25) for i in range(3)]
    waiting = [RequestView(i, None, "x", 1.0, 1.0) for i in range(3, 7)]
    plan = plan_exact(two(*running, *waiting))
    assert plan.objective == pytest.approx(9.0)
    *first, last = (move[0] for move in plan.moves)
    assert last in range(3)
    assert len(first) >= 3
    assert set(first) <= set(range(3, 7))


def test_the_largest_that_fit_stay_on_the_device():
    assert swapped_bytes([4.0, 3.0, 2.0], 9.0) == 0.0
    assert swapped_bytes([4.0, 3.0, 2.0], 6.0) == 3.0
    assert swapped_bytes([4.0, 3.0], 1.0) == 7.0


def test_views_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="twice"):
        two(RequestView(1, None, "x", 1.0, 1.0), RequestView(1, None, "y", 1.0, 1.0))
    with pytest.raises(ValueError, match="not among"):
        two(RequestView(1, "c", "x", 1.0, 1.0))
    with pytest.raises(ValueError, match="move_factor"):
        two(RequestView(1, None, "x", 1.0, 1.0, 0.5))
    with pytest.raises(ValueError, match="swap_bytes_per_s"):
        replace(two(), swap_bytes_per_s=0.0)


def least_of_all(problem: MigrationProblem) -> float:
    """By trying every placement."""
    placement, best = Placement(problem), math.inf
    for targets in itertools.product(range(len(problem.replicas)), repeat=len(problem.requests)):
        for i, j in enumerate(targets):
            placement.move(i, j)
        best = min(best, placement.objective())
    return best


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_replicas=3, max_requests=5))
def test_the_exact_plan_is_the_best_of_all_placements(problem):
    plan = plan_exact(problem)
    check_plan(problem, plan)
    best = least_of_all(problem)
    if math.isfinite(best):
        # The host's share is chosen greedily where all placements are tried, exactly by the program.
        assert plan.objective <= best * (1 + 1e-6) + 1e-9
        assert plan.bound <= best * (1 + 1e-6) + 1e-9
    else:
        assert plan.moves == ()
