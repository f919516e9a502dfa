# SPDX-License-Identifier: Apache-2.0
"""When requests move: thresholds, pauses, gains; how: by tokens or by KV."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config.front_end import MigrationConfig
from moe_lora.policies.migration.fast import plan_fast
from moe_lora.policies.migration.problem import (
    MigrationPlan,
    MigrationProblem,
    Placement,
    ReplicaView,
    RequestId,
    RequestView,
)
from moe_lora.policies.migration.programs import plan_relaxed
from moe_lora.policies.migration.triggers import (
    DLoraMigration,
    MoveCost,
    ReplicaPressure,
    cheaper_move,
    move_factor,
    paying_moves,
)
from moe_lora.timing.step_model import Row, StepModel
from tests.policies.migration_cases import check_plan, placed, problems

CONFIG = MigrationConfig(
    migration="dlora",
    migration_interval_s=1.0,
    migration_queue_s=0.5,
    migration_free_share=0.1,
    migration_min_gain=0.1,
)
CALM, QUEUED, FULL = ReplicaPressure(0, 0.5, 0.1), ReplicaPressure(1, 0.5, 0.6), ReplicaPressure(1, 0.05, 0.0)
UNEVEN = MigrationProblem(
    [ReplicaView(0, 100.0), ReplicaView(1, 100.0)], [RequestView(i, None, 1, 1.0, 1.0) for i in range(4)], []
)
EVEN = MigrationProblem(
    [ReplicaView(0, 100.0), ReplicaView(1, 100.0)], [RequestView(i, None, i, 1.0, 1.0) for i in range(2)], []
)


def never() -> MigrationProblem:
    raise AssertionError("the problem was built for nothing")


@pytest.mark.parametrize("pressed", [QUEUED, FULL])
def test_a_queue_and_full_memory_each_start_a_plan(pressed):
    policy = DLoraMigration(CONFIG)
    assert policy.decide([CALM, CALM], never, 0.0) is None
    plan = policy.decide([CALM, pressed], lambda: UNEVEN, 0.0)
    assert plan is not None
    assert [move[1:] for move in plan.moves] == [(1, 0), (1, 0)]
    assert (policy.num_plans, policy.num_moves) == (1, 2)


def test_the_next_plan_waits_for_the_interval():
    policy = DLoraMigration(CONFIG)
    assert policy.decide([QUEUED], lambda: UNEVEN, 5.0) is not None
    assert policy.decide([QUEUED], never, 5.9) is None
    assert policy.decide([QUEUED], lambda: UNEVEN, 6.0) is not None


def test_plans_that_gain_nothing_come_ever_less_often_until_all_is_calm():
    policy = DLoraMigration(CONFIG)
    at = []
    for tenth in range(1000):
        before = policy.num_plans
        assert policy.decide([QUEUED], lambda: EVEN, tenth / 10) is None
        at += [tenth / 10] * (policy.num_plans - before)
    assert at[:6] == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0]
    assert max(after - before for before, after in itertools.pairwise(at)) == 16.0
    assert policy.decide([CALM], never, 100.0) is None
    assert policy.decide([QUEUED], lambda: EVEN, 120.0) is None
    assert policy.decide([QUEUED], never, 120.9) is None
    assert policy.decide([QUEUED], lambda: UNEVEN, 121.0) is not None


def test_a_plan_has_to_gain_enough_and_memory_that_is_found_always_does():
    def moves(longest_s: float, host_bytes: float = math.inf) -> bool:
        """Of two requests that take 10 s one can leave; without host memory there is room for one."""
        room = 1.0 if host_bytes == 0 else 100.0
        problem = MigrationProblem(
            [ReplicaView(0, 100.0), ReplicaView(1, room, host_bytes)],
            [RequestView(0, None, 1, 1.0, longest_s), RequestView(1, None, 1, 1.0, 10 - longest_s)],
            [],
        )
        return DLoraMigration(CONFIG).decide([QUEUED], lambda: problem, 0.0) is not None

    assert not moves(9.1)
    assert moves(9.0)
    assert moves(9.1, host_bytes=0)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 5),
)
def test_a_plan_is_made_where_memory_or_a_queue_passes_its_threshold_and_not_else(found, free_share, queue_s):
    """dLoRA section 5.2: little free memory, or a queueing delay above a threshold, at any one replica."""
    config = replace(CONFIG, migration_free_share=free_share, migration_queue_s=queue_s)
    policy = DLoraMigration(config)
    replicas = [ReplicaPressure(j, free, queued) for j, (free, queued) in enumerate(found)]
    policy.decide(replicas, lambda: UNEVEN, 0.0)
    is_due = min(free for free, _ in found) < free_share or max(queued for _, queued in found) > queue_s
    assert policy.num_plans == is_due


# Which of a plan's moves are made.


def thrown(problem: MigrationProblem) -> MigrationPlan:
    """A plan that sends every request to the next replica, whatever that costs."""
    names = [one.name for one in problem.replicas]
    after = dict(zip(names, names[1:] + names[:1], strict=True))
    moves = [(one.request_id, one.replica, after[one.replica]) for one in problem.requests]
    return MigrationPlan(tuple(move for move in moves if move[1] != move[2]), (), 0.0, 0.0)


@given(problems(), st.sampled_from([plan_fast, plan_relaxed, thrown]), st.data())
def test_moves_that_are_made_pay_and_find_seats(problem, planner, data):
    seats = [data.draw(st.integers(0, 3)) for _ in problem.replicas]
    replicas = [replace(one, free_seats=free) for one, free in zip(problem.replicas, seats, strict=True)]
    problem = replace(problem, replicas=replicas)
    staying = {one.request_id for one in problem.requests if data.draw(st.booleans())}
    planned = planner(problem)
    plan = paying_moves(problem, planned, staying)
    assert set(plan.moves) <= set(planned.moves)
    assert not staying & {move[0] for move in plan.moves}
    check_plan(problem, plan)
    coming = Counter(move[2] for move in plan.moves)
    assert all(coming[one.name] <= one.free_seats for one in replicas)
    requests = {one.request_id: one for one in problem.requests}
    costs_s = [(requests[one].move_factor - 1) * requests[one].exec_s for one, _, _ in plan.moves]
    assert costs_s == sorted(costs_s), "those that wait first"
    before = Placement(problem)
    if len(plan.moves) == 1:
        (_, source, target), placement = plan.moves[0], placed(problem, plan)
        where = [j for j, one in enumerate(replicas) if one.name in (source, target)]
        was, now = (max(one.cost(j) for j in where) for one in (before, placement))
        assert now[0] < was[0] or now[1] < was[1] - costs_s[0]


def test_a_request_that_ends_sooner_than_it_has_moved_stays():
    """Three steps of a second seat are three tokens: with four left it goes, with three it stays."""
    for num_left, goes in ((4, True), (3, False)):
        factor = move_factor(num_left * 0.1, MoveCost("kv", 0.0), 0.1)
        mine = [RequestView(i, None, 1, 1.0, 1.0) for i in range(2)]
        leaves = RequestView(2, None, 1, 1.0, num_left * 0.1, factor)
        problem = MigrationProblem([ReplicaView(0, 9.0), ReplicaView(1, 9.0)], [*mine, leaves], [])
        plan = MigrationPlan(((2, 1, 0),), (), 0.0, 0.0)
        assert bool(paying_moves(problem, plan).moves) is goes


def test_a_request_whose_move_failed_stays_for_sixteen_intervals():
    policy = DLoraMigration(CONFIG)

    def moved(now_s: float) -> set[RequestId]:
        plan = policy.decide([QUEUED], lambda: UNEVEN, now_s)
        assert plan is not None
        return {move[0] for move in plan.moves}

    first = moved(0.0)
    failed = min(first)
    policy.note_failed([failed], 0.0)
    assert moved(1.0) == moved(15.9) == first - {failed}
    assert moved(16.9) == first


STEPS = StepModel(
    kernel="sgmv",
    form="full",
    expert_share=1.0,
    decode_s={"step": 0.01},
    prefill_s={"step": 0.01, "tokens": 1e-3},
)


def test_a_request_moves_by_what_takes_less_time():
    row = Row("a", 8, 90)
    assert cheaper_move(row, 1e3, STEPS, 1e5) == MoveCost("kv", 0.01)
    assert cheaper_move(row, 1e5, STEPS, 1e5) == MoveCost("tokens", pytest.approx(0.1))
    assert cheaper_move(row, 1e3, STEPS, 1e5, same_layout=False).kind == "tokens"
    assert cheaper_move(row, 1e3, None, 1e5) == MoveCost("kv", 0.01)
    assert cheaper_move(row, 1e3, None, 1e5, same_layout=False) == MoveCost("tokens", 0.0)


def test_the_move_factor_is_the_time_with_the_move_over_that_without():
    assert move_factor(2.0, MoveCost("kv", 0.2), 0.1) == pytest.approx(1.25)
    assert move_factor(2.0, None, 0.1) == 1.0
    assert move_factor(0.0, MoveCost("kv", 0.5), 0.1) > 1.0


@pytest.mark.parametrize("solver", ["fast", "relaxed", "exact"])
def test_each_solver_can_be_chosen(solver):
    policy = DLoraMigration(replace(CONFIG, migration_solver=solver))
    plan = policy.decide([QUEUED], lambda: UNEVEN, 0.0)
    assert plan is not None
    assert (plan.objective, len(plan.moves)) == (2.0, 2)
    assert (plan.bound > 0) is (solver != "relaxed")
