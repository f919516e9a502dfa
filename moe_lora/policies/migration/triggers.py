# SPDX-License-Identifier: Apache-2.0
"""When requests are moved to other replicas, which of a plan's moves pay, and how a running request moves.

The caller says how pressed replicas are, builds the problem of `migration` when asked to, and carries the
plan out: loads, then moves in their order.  The running front end and the simulator are callers.
Source: dLoRA, section 5.2 (thresholds on memory and queueing); numbers, seats, and the choice between tokens
and KV are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from moe_lora.config.front_end import MigrationConfig
from moe_lora.timing.step_model import Row, StepModel

from .exact import plan_exact
from .fast import plan_fast
from .problem import TOLERANCE, MigrationPlan, MigrationProblem, Placement, ReplicaName, RequestId
from .relaxed import plan_relaxed

Planner: TypeAlias = Callable[[MigrationProblem], MigrationPlan]
MoveKind: TypeAlias = Literal["tokens", "kv"]
MOST_INTERVALS = 16.0
"""Between plans that gain too little."""
MOVE_STEPS = 3.0
"""For which a move takes a second seat: the rest of the source's step and of the target's, and one more."""


def make_planner(config: MigrationConfig) -> Planner:
    """That of migration_solver."""
    if config.migration_solver == "exact":
        return partial(plan_exact, time_limit_s=config.migration_interval_s)
    plan = plan_fast if config.migration_solver == "fast" else plan_relaxed
    return partial(plan, num_selected=config.migration_selected)


@dataclass(frozen=True, slots=True)
class ReplicaPressure:
    """free_share: of its device memory, what requests could still get.  queued_s: how long the request there
    that has waited longest for its first step has; 0 if none waits.
    """

    name: ReplicaName
    free_share: float
    queued_s: float


class DLoraMigration:
    """Plans moves when a replica is short of memory or its requests queue, but not too often.

    Between two plans lie migration_interval_s at least; after one that gained too little twice as long as
    before it, up to 16 intervals, until nothing is pressed any more.  Of a plan only `paying_moves` are made.
    planner: that of migration_solver if None.  num_plans: problems solved; num_moves: in the plans returned.
    """

    def __init__(self, config: MigrationConfig, planner: Planner | None = None) -> None:
        self.num_plans = self.num_moves = 0
        self._config = config
        self._planner = planner or make_planner(config)
        self._wait_s = config.migration_interval_s
        self._next_s = 0.0
        self._stay_until_s: dict[RequestId, float] = {}

    def is_pressed(self, replica: ReplicaPressure) -> bool:
        """Whether a threshold is passed there."""
        config = self._config
        return replica.free_share < config.migration_free_share or replica.queued_s > config.migration_queue_s

    def decide(
        self, replicas: Iterable[ReplicaPressure], problem: Callable[[], MigrationProblem], now_s: float
    ) -> MigrationPlan | None:
        """The moves to make now; None: none.  problem: called only where a plan is made.

        A plan is worth its moves if the slowest replica takes migration_min_gain less than before.
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
        """Their moves failed: they stay where they are for 16 intervals."""
        until_s = now_s + MOST_INTERVALS * self._config.migration_interval_s
        self._stay_until_s.update(dict.fromkeys(requests, until_s))


def paying_moves(
    problem: MigrationProblem, plan: MigrationPlan, staying: Collection[RequestId] = ()
) -> MigrationPlan:
    """The moves of a plan that are worth making; those that wait first, then the cheapest.

    Each goes to a replica with a free seat, for a request that moves holds one at both ends, and one that
    finds none waits there too.  Each makes the slower of its two replicas faster by more than its own seconds
    (so one that ends sooner than it has moved stays), or finds memory where some lacks.  staying: these don't
    move.  Moves that only pay after others are tried again after them.
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
    """Move a request if that pays; whether it did."""
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


# How a running request moves, and what that costs it.


@dataclass(frozen=True, slots=True)
class MoveCost:
    """seconds: until the target can go on.  By tokens it computes them again; by KV their bytes come."""

    kind: MoveKind
    seconds: float


def cheaper_move(
    tokens: Row, num_bytes: float, steps: StepModel | None, bytes_per_s: float, *, same_layout: bool = True
) -> MoveCost:
    """How a running request moves: by its token ids, or by the KV of all of them.

    tokens: what the target would compute again, in one prefill step of its own.  num_bytes: of their KV.
    steps: None: not known, so tokens if KV can't go, else KV.  bytes_per_s: between the two instances.
    same_layout: False where KV can't go: another dtype, page size or number of ranks at the target.
    """
    kv = MoveCost("kv", num_bytes / bytes_per_s)
    if steps is None:
        return kv if same_layout else MoveCost("tokens", 0.0)
    again = MoveCost("tokens", steps.prefill_step_s([tokens]))
    return kv if same_layout and kv.seconds < again.seconds else again


def move_factor(exec_s: float, cost: MoveCost | None, token_s: float) -> float:
    """gamma: (execution with the move) / (execution without); 1 without a cost: it waits.

    token_s: seconds of a replica for each token, as in exec_s; a seat that is taken for a step costs one.
    """
    return 1.0 if cost is None else 1.0 + (cost.seconds + MOVE_STEPS * token_s) / max(exec_s, 1e-6)
