# SPDX-License-Identifier: Apache-2.0
"""Fast and relaxed plans: never worse than nothing, within memory; fast ones near the exact ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.dlora.uneven_replicas import uneven_problem
from moe_lora.policies.migration.fast import plan_fast
from moe_lora.policies.migration.problem import (
    AdapterSize,
    MigrationProblem,
    Placement,
    ReplicaView,
    RequestView,
    lower_bound,
)
from moe_lora.policies.migration.programs import plan_exact, plan_relaxed
from tests.grids import diagonal
from tests.policies.migration_cases import check_plan, problems


@settings(max_examples=80, deadline=None)
@given(problem=problems(), num_selected=st.integers(1, 4), planner=st.sampled_from([plan_fast, plan_relaxed]))
def test_a_plan_is_never_worse_and_within_memory_and_places_each_request_once(problem, num_selected, planner):
    check_plan(problem, planner(problem, num_selected=num_selected))


@settings(max_examples=25, deadline=None)
@given(problem=problems(max_replicas=4, max_requests=10))
def test_no_plan_is_below_the_bound_and_none_better_than_the_exact(problem):
    exact, fast, relaxed = plan_exact(problem, time_limit_s=20.0), plan_fast(problem), plan_relaxed(problem)
    check_plan(problem, exact)
    bound = lower_bound(Placement(problem))
    assert bound <= exact.objective * (1 + 1e-6) + 1e-9
    assert fast.bound == min(bound, fast.objective)
    for other in (fast, relaxed):
        assert exact.bound <= other.objective * (1 + 1e-6) + 1e-9
        assert (
            exact.objective <= other.objective * (1 + 1e-6) + 1e-9
            or exact.objective == exact.objective_before
        )


def test_the_bound_counts_adapters_copies_loads_and_what_finds_no_room():
    def bound(device_bytes: float, held: set[str], **more: float) -> float:
        replicas = [ReplicaView(j, device_bytes, math.inf, held if j == 0 else set()) for j in range(2)]
        requests = [RequestView(i, "a", 0, 10.0, 1.0) for i in range(8)]
        sizes = [AdapterSize("a", 20.0, 0.5)]
        return lower_bound(Placement(MigrationProblem(replicas, requests, sizes, 40.0, **more)))

    assert bound(1000.0, {"a"}) == pytest.approx(4.25, rel=1e-5)  # 8 s and a copy to load, on two
    assert bound(1000.0, set()) == pytest.approx(4.5, rel=1e-5)
    assert bound(1000.0, {"a"}, affinity_s=1.0) == pytest.approx(5.25, rel=1e-5)
    assert bound(50.0, {"a"}) == pytest.approx(4.5, rel=1e-5)  # 20 of 120 bytes are swapped


@pytest.mark.parametrize(
    ("size", "affinity_s", "device_bytes"),
    diagonal(((2, 8), (2, 16), (3, 6), (4, 5)), (0.0, 0.05, 0.5), (150.0, 400.0)),
)
def test_the_fast_plan_is_within_5_percent_of_the_exact_one(size, affinity_s, device_bytes):
    num_replicas, requests = size
    problem = uneven_problem(
        num_replicas,
        seed=num_replicas + requests,
        num_adapters=8,
        requests_per_replica=requests,
        affinity_s=affinity_s,
        device_bytes=device_bytes,
    )
    exact, fast = plan_exact(problem, time_limit_s=2.0), plan_fast(problem)
    check_plan(problem, fast)
    assert fast.moves
    # No plan is below the bounds; where HiGHS has the time to prove an optimum, its bound is that.
    bound = max(exact.bound, fast.bound)
    assert bound * (1 - 1e-6) <= fast.objective <= 1.05 * bound


@pytest.mark.parametrize(("num_replicas", "seed"), [(20, 0), (60, 1), (200, 2)])
def test_plans_of_many_replicas_are_within_5_percent_of_the_bound(num_replicas, seed):
    problem = uneven_problem(num_replicas, seed)
    plan = plan_fast(problem)
    check_plan(problem, plan)
    assert 0 < plan.bound <= plan.objective <= 1.05 * plan.bound < plan.objective_before


def burst(num_replicas: int, held: int) -> MigrationProblem:
    """All requests for one adapter, on the first replicas; each holds it, the others hold nothing."""
    requests = [RequestView(i, "hot", i % held, 4.0, 1.0) for i in range(4 * num_replicas)]
    replicas = [
        ReplicaView(j, 400.0, math.inf, {"hot"} if j < held else frozenset()) for j in range(num_replicas)
    ]
    return MigrationProblem(replicas, requests, [AdapterSize("hot", 10.0)])


def test_a_burst_on_one_adapter_is_spread_and_the_adapter_with_it():
    plan = plan_fast(burst(8, 2))
    assert (plan.objective_before, plan.objective) == (16.0, 4.0)
    assert {target for _, target in plan.loads} == set(range(2, 8))


def test_as_many_replicas_give_as_are_above_the_bound_but_k_by_the_linear_program():
    plan = plan_fast(burst(40, 3))
    assert (plan.objective, plan.bound) == (4.0, 4.0)
    assert {move[1] for move in plan.moves} == {0, 1, 2}
    assert {move[2] for move in plan.moves} == set(range(3, 40))
    few = plan_relaxed(burst(40, 2), num_selected=2)
    assert {move[1] for move in few.moves} == {0, 1}
    assert len({move[2] for move in few.moves}) == 2
    assert plan.objective < few.objective < few.objective_before


def test_what_waits_goes_rather_than_what_runs():
    requests = [RequestView(i, None, 0, 1.0, 1.0, 1.2 if i % 2 else 1.0) for i in range(8)]
    replicas = [ReplicaView(0, 100.0), ReplicaView(1, 100.0)]
    plan = plan_fast(MigrationProblem(replicas, requests, []))
    assert plan.objective == pytest.approx(4.0)
    assert {move[0] for move in plan.moves} == {0, 2, 4, 6}


def test_balanced_replicas_are_left_alone():
    requests = [RequestView(i, "a", i % 4, 1.0, 1.0, 1.1) for i in range(16)]
    replicas = [ReplicaView(j, 100.0) for j in range(4)]
    plan = plan_fast(MigrationProblem(replicas, requests, [AdapterSize("a", 5.0)]))
    assert plan.moves == ()
    assert plan.objective == plan.objective_before == 4.0


def test_memory_that_lacks_is_found_elsewhere():
    requests = [RequestView(i, None, 0, 30.0, 1.0, 1.5) for i in range(5)]
    problem = MigrationProblem([ReplicaView(0, 60.0, 30.0), ReplicaView(1, 60.0, 0.0)], requests, [])
    plan = plan_fast(problem)
    assert plan.objective_before == math.inf
    assert math.isfinite(plan.objective)
    check_plan(problem, plan)
    full = replace(problem, replicas=[problem.replicas[0], ReplicaView(1, 20.0, 0.0)])
    assert plan_fast(full).moves == ()


def test_one_replica_and_no_requests_have_nothing_to_plan():
    assert plan_fast(MigrationProblem([ReplicaView(0, 1.0)], [], [])).moves == ()
    alone = MigrationProblem([ReplicaView(0, 9.0)], [RequestView(0, None, 0, 1.0, 1.0)], [])
    assert plan_fast(alone).moves == ()
