"""When requests are moved to other replicas, and how a running one is: by its tokens or by its KV.

The caller says how pressed replicas are, builds the problem of `migration` when asked to, and carries the
plan out: loads, then moves in their order.  The running front end and the simulator are callers.
Source: dLoRA, section 5.2 (thresholds on memory and queueing); numbers and the choice of the kind are ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from moe_lora.config.front_end import MigrationConfig

from .fast_migration import plan_fast
from .migration import MigrationPlan, MigrationProblem, ReplicaName
from .step_model import Row, StepModel

Planner: TypeAlias = Callable[[MigrationProblem], MigrationPlan]
MoveKind: TypeAlias = Literal["tokens", "kv"]


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
    before it, up to 16 intervals, until nothing is pressed any more.  planner: `plan_fast` if None.
    num_plans: problems solved; num_moves: in the plans returned.
    """

    def __init__(self, config: MigrationConfig, planner: Planner | None = None) -> None:
        self.num_plans = self.num_moves = 0
        self._config = config
        self._planner = planner or partial(plan_fast, num_selected=config.migration_selected)
        self._wait_s = config.migration_interval_s
        self._next_s = 0.0

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
        plan = self._planner(problem())
        if plan.moves and plan.objective <= plan.objective_before * (1 - config.migration_min_gain):
            self._wait_s = config.migration_interval_s
            self._next_s = now_s + self._wait_s
            self.num_moves += len(plan.moves)
            return plan
        self._next_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, 16 * config.migration_interval_s)
        return None


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


def move_factor(exec_s: float, move_s: float) -> float:
    """gamma: (execution with the move) / (execution without); 1 for one that waits, whose move_s is 0."""
    return 1.0 if move_s <= 0 else 1.0 + move_s / max(exec_s, 1e-6)


class AnswerLengths:
    """Mean tokens of each adapter's answers so far: how long a request is expected to run.

    prior_tokens: what an adapter's answers count as before there are any, with the weight of `PRIOR` answers.
    Source: L_i of dLoRA table 1, the mean of the adapter's requests.
    """

    PRIOR = 8.0

    def __init__(self, prior_tokens: float = 128.0) -> None:
        self._tokens: defaultdict[str | None, float] = defaultdict(lambda: self.PRIOR * prior_tokens)
        self._num: defaultdict[str | None, float] = defaultdict(lambda: self.PRIOR)

    def note(self, adapter: str | None, num_tokens: int) -> None:
        """An answer has ended."""
        self._tokens[adapter] += num_tokens
        self._num[adapter] += 1

    def left(self, adapter: str | None, num_so_far: int, num_most: int) -> float:
        """Tokens that an answer of so many is expected to gain; 1 at least, and none over its limit."""
        mean = self._tokens[adapter] / self._num[adapter]
        return max(1.0, min(mean, num_most) - num_so_far)
