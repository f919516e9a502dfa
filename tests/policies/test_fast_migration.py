"""Plans in milliseconds: never worse than nothing, within memory, near the exact ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.dlora.uneven_replicas import uneven_problem
from moe_lora.policies.fast_migration import plan_fast
from moe_lora.policies.migration import AdapterSize, MigrationProblem, ReplicaView, RequestView, plan_exact

from .migration_cases import check_plan, problems


@settings(max_examples=200, deadline=None)
@given(
    problem=problems(),
    num_selected=st.integers(1, 4),
    max_rounds=st.integers(1, 4),
    relaxed=st.sampled_from([True, False, None]),
)
def test_a_fast_plan_is_never_worse_and_within_memory_and_places_each_request_once(
    problem, num_selected, max_rounds, relaxed
):
    plan = plan_fast(problem, num_selected=num_selected, max_rounds=max_rounds, relaxed=relaxed)
    check_plan(problem, plan)


@settings(max_examples=40, deadline=None)
@given(problem=problems(max_replicas=4, max_requests=10))
def test_the_exact_plan_is_a_bound_for_the_fast_one(problem):
    exact, fast = plan_exact(problem, time_limit_s=20.0), plan_fast(problem)
    check_plan(problem, exact)
    assert exact.bound <= fast.objective * (1 + 1e-6) + 1e-9
    assert exact.objective <= fast.objective * (1 + 1e-6) + 1e-9 or exact.objective == exact.objective_before


GRID = [
    (num_replicas, requests, affinity_s, device_bytes)
    for num_replicas, requests in ((2, 8), (2, 16), (3, 6), (4, 5))
    for affinity_s in (0.0, 0.05, 0.5)
    for device_bytes in (150.0, 400.0)
]


@pytest.mark.parametrize(("num_replicas", "requests", "affinity_s", "device_bytes"), GRID)
def test_the_fast_plan_is_within_5_percent_of_the_exact_one(num_replicas, requests, affinity_s, device_bytes):
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
    # No plan is below the bound; where HiGHS has the time to prove an optimum, it is that.
    assert exact.bound * (1 - 1e-6) <= fast.objective <= 1.05 * exact.bound


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


def test_of_many_replicas_the_k_slowest_and_fastest_are_looked_at():
    one = plan_fast(burst(40, 2), num_selected=2, max_rounds=1)
    sources, targets = ({move[place] for move in one.moves} for place in (1, 2))
    assert sources == {0, 1}
    assert len(targets) == 2
    more = plan_fast(burst(40, 2), num_selected=2, max_rounds=4)
    assert more.objective < one.objective < one.objective_before


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
