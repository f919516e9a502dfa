"""When requests move: thresholds, pauses, gains; how: by tokens or by KV."""

from __future__ import annotations

import itertools
import math

import pytest

from moe_lora.config.front_end import MigrationConfig
from moe_lora.policies.migration import MigrationPlan, MigrationProblem, ReplicaView, RequestView
from moe_lora.policies.migration_triggers import (
    AnswerLengths,
    DLoraMigration,
    MoveCost,
    ReplicaPressure,
    cheaper_move,
    move_factor,
)
from moe_lora.policies.step_model import Row, StepModel

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
    moves = ((0, 1, 0),)

    def answer(objective: float, before: float) -> MigrationPlan | None:
        policy = DLoraMigration(CONFIG, lambda _: MigrationPlan(moves, (), objective, before))
        return policy.decide([QUEUED], lambda: UNEVEN, 0.0)

    assert answer(9.1, 10.0) is None
    assert answer(9.0, 10.0) is not None
    assert answer(9.0, math.inf) is not None


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
    assert move_factor(2.0, 0.5) == 1.25
    assert move_factor(2.0, 0.0) == 1.0
    assert move_factor(0.0, 0.5) > 1.0


def test_answers_are_expected_to_be_as_long_as_those_of_their_adapter_were():
    lengths = AnswerLengths(100.0)
    assert lengths.left("a", 0, 1000) == 100.0
    for _ in range(8):
        lengths.note("a", 300)
    assert lengths.left("a", 0, 1000) == 200.0
    assert lengths.left("a", 150, 1000) == 50.0
    assert lengths.left("a", 250, 1000) == 1.0
    assert lengths.left("a", 0, 40) == 40.0
    assert lengths.left("b", 0, 1000) == 100.0
