# SPDX-License-Identifier: Apache-2.0
"""Migration problems: small ones by hand, drawn ones, and what holds for any plan."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from moe_lora.policies.migration.problem import (
    AdapterSize,
    MigrationPlan,
    MigrationProblem,
    Placement,
    ReplicaView,
    RequestView,
)


def placed(problem: MigrationProblem, plan: MigrationPlan) -> Placement:
    """The placement after the plan; checks that each move is one of a request that is where it says."""
    placement = Placement(problem)
    replicas = {one.name: j for j, one in enumerate(problem.replicas)}
    index = {one.request_id: i for i, one in enumerate(problem.requests)}
    assert len({move[0] for move in plan.moves}) == len(plan.moves)
    for request, source, target in plan.moves:
        assert problem.requests[index[request]].replica == source != target
        placement.move(index[request], replicas[target])
    return placement


def check_plan(problem: MigrationProblem, plan: MigrationPlan) -> None:
    """Existence, matching, memory, and an objective that is no worse and is what the plan gives."""
    placement = placed(problem, plan)
    where = [j for j, members in enumerate(placement.members) for _ in members]
    assert len(where) == len(problem.requests)
    loads = set(plan.loads)
    assert len(loads) == len(plan.loads)
    for i, j in enumerate(placement.replica_of):
        adapter, replica = problem.requests[i].adapter, problem.replicas[j]
        if j != placement.home[i] and adapter is not None:
            assert adapter in replica.adapters or (adapter, replica.name) in loads
    start = Placement(problem)
    for j in range(len(problem.replicas)):
        assert placement.cost(j)[0] <= start.cost(j)[0]
    assert plan.objective <= plan.objective_before
    assert plan.objective_before == start.objective()
    if math.isfinite(plan.objective):
        assert plan.objective <= placement.objective() * (1 + 1e-6) or plan.moves == ()


@st.composite
def problems(draw: st.DrawFn, max_replicas: int = 5, max_requests: int = 24) -> MigrationProblem:
    names = [f"lora-{k}" for k in range(draw(st.integers(1, 5)))]
    num_replicas = draw(st.integers(1, max_replicas))
    room = draw(st.sampled_from([6.0, 20.0, 60.0, 1000.0]))
    replicas = [
        ReplicaView(
            f"r{j}",
            room * draw(st.sampled_from([1.0, 1.0, 0.5])),
            draw(st.sampled_from([math.inf, 10.0, 40.0])),
            frozenset(draw(st.sets(st.sampled_from(names)))),
        )
        for j in range(num_replicas)
    ]
    requests = [
        RequestView(
            i,
            draw(st.sampled_from([None, *names])),
            f"r{draw(st.integers(0, num_replicas - 1)) if draw(st.booleans()) else 0}",
            draw(st.sampled_from([0.0, 1.0, 2.5, 7.0])),
            draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])),
            draw(st.sampled_from([1.0, 1.1, 2.0])),
        )
        for i in range(draw(st.integers(0, max_requests)))
    ]
    sizes = [
        AdapterSize(name, draw(st.sampled_from([0.5, 2.0])), draw(st.sampled_from([0.0, 0.3])))
        for name in names
    ]
    return MigrationProblem(
        replicas, requests, sizes, swap_bytes_per_s=4.0, affinity_s=draw(st.sampled_from([0.0, 0.2, 1.0]))
    )
