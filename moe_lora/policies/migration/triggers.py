# SPDX-License-Identifier: Apache-2.0
"""Migration triggers, paying moves, and the form of a move.

Source: dLoRA, section 5.2; numbers, seats, and the choice of tokens or KV are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from moe_lora.config.front_end import MigrationConfig
from moe_lora.timing.host_times import LinkTime
from moe_lora.timing.step_model import Row, StepModel

from .fast import plan_fast
from .problem import TOLERANCE, MigrationPlan, MigrationProblem, Placement, ReplicaName, RequestId
from .programs import plan_exact, plan_relaxed

Planner: TypeAlias = Callable[[MigrationProblem], MigrationPlan]
MoveKind: TypeAlias = Literal["tokens", "kv"]
MOST_INTERVALS = 16.0
"""Longest pause between plans of too little gain."""
MOVE_STEPS = 3.0
"""The rest of both replicas' steps, and one more."""


def make_planner(config: MigrationConfig) -> Planner:
    if config.migration_solver == "exact":
        return partial(plan_exact, time_limit_s=config.migration_interval_s)
    plan = plan_fast if config.migration_solver == "fast" else plan_relaxed
    return partial(plan, num_selected=config.migration_selected)


@dataclass(frozen=True, slots=True)
class ReplicaPressure:
    """free_share: of device memory.  queued_s: longest wait for a first step."""

    name: ReplicaName
    free_share: float
    queued_s: float


class DLoraMigration:
    """Plans moves when a replica lacks memory or its requests queue.

    The pause doubles after too little gain, up to 16 intervals, until the pressure ends.
    """

    def __init__(self, config: MigrationConfig, planner: Planner | None = None) -> None:
        self.num_plans = self.num_moves = 0
        self._config = config
        self._planner = planner or make_planner(config)
        self._wait_s = config.migration_interval_s
        self._next_s = 0.0
        self._stay_until_s: dict[RequestId, float] = {}

    def is_pressed(self, replica: ReplicaPressure) -> bool:
        """True above a threshold."""
        config = self._config
        return replica.free_share < config.migration_free_share or replica.queued_s > config.migration_queue_s

    def decide(
        self, replicas: Iterable[ReplicaPressure], problem: Callable[[], MigrationProblem], now_s: float
    ) -> MigrationPlan | None:
        """The moves to make now, or None.

        A plan must shorten the slowest replica's time by migration_min_gain.
        """
        config = self._config
        if not any(map(self.is_pressed, replicas)):
            self._wait_s = config.migration_interval_s
            return None
        if now_s < self._next_s:
            return None
        self.num_plans += 1
        self._stay_until_s = {one: until for one, until in self._stay_until_s.items() if until > now_s}
        built = problem()
        plan = paying_moves(built, self._planner(built), self._stay_until_s)
        if plan.moves and plan.objective <= plan.objective_before * (1 - config.migration_min_gain):
            self._wait_s = config.migration_interval_s
            self._next_s = now_s + self._wait_s
            self.num_moves += len(plan.moves)
            return plan
        self._next_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, MOST_INTERVALS * config.migration_interval_s)
        return None

    def note_failed(self, requests: Iterable[RequestId], now_s: float) -> None:
        """Requests of failed moves stay for 16 intervals."""
        until_s = now_s + MOST_INTERVALS * self._config.migration_interval_s
        self._stay_until_s.update(dict.fromkeys(requests, until_s))


def paying_moves(
    problem: MigrationProblem, plan: MigrationPlan, staying: Collection[RequestId] = ()
) -> MigrationPlan:
    """The paying moves of a plan; waiting requests first, then the cheapest.

    A target needs a free seat; a moving request holds one at both ends.  A move must make the slower of both
    replicas faster by more than its own seconds, or fix missing memory.
    """
    placement = Placement(problem)
    before = placement.objective()
    index_of = {one.request_id: i for i, one in enumerate(problem.requests)}
    replica_of = {one.name: j for j, one in enumerate(problem.replicas)}
    cost_s = (placement.moved_s - placement.exec_s).tolist()
    free = [one.free_seats for one in problem.replicas]
    left = [(index_of[one], replica_of[j]) for one, _, j in plan.moves if one not in staying]
    left.sort(key=lambda move: cost_s[move[0]])
    made = True
    while made:
        made = False
        for i, target in left.copy():
            if free[target] >= 1 and _lowers(placement, i, target, cost_s[i]):
                free[target] -= 1
                left.remove((i, target))
                made = True
    objective = placement.objective()
    return placement.plan(objective, before, min(plan.bound, objective))


def _lowers(placement: Placement, i: int, target: int, cost_s: float) -> bool:
    home = placement.replica_of[i]
    old = placement.cost(home), placement.cost(target)
    placement.move(i, target)
    new = placement.cost(home), placement.cost(target)
    (lacked, was_s), (lacks, is_s) = max(old), max(new)
    is_faster = lacks == lacked and was_s - is_s > cost_s + TOLERANCE * was_s
    if new[1][0] <= old[1][0] and (lacks < lacked or is_faster):
        return True
    placement.move(i, home)
    return False


@dataclass(frozen=True, slots=True)
class MoveCost:
    """seconds: until the target can continue."""

    kind: MoveKind
    seconds: float


def cheaper_move(
    tokens: Row, num_bytes: float, steps: StepModel | None, bytes_per_s: float, *, same_layout: bool = True
) -> MoveCost:
    """A running request's move: by token ids, or by KV.

    tokens: to recompute in one prefill step at the target.  steps: None: KV, or tokens if KV can't move.
    same_layout: equal dtype, page size and ranks.
    """
    kv = MoveCost("kv", LinkTime(bytes_per_s).seconds(num_bytes))
    if steps is None:
        return kv if same_layout else MoveCost("tokens", 0.0)
    again = MoveCost("tokens", steps.prefill_step_s([tokens]))
    return kv if same_layout and kv.seconds < again.seconds else again


def move_factor(exec_s: float, cost: MoveCost | None, token_s: float) -> float:
    """gamma: (execution with the move) / (execution without); 1 without a cost.

    token_s: seconds per token; a held seat costs one per step.
    """
    return 1.0 if cost is None else 1.0 + (cost.seconds + MOVE_STEPS * token_s) / max(exec_s, 1e-6)
