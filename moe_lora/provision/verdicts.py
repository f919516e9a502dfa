"""Whether replays of a plan keep its three targets, and by how much they don't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from moe_lora.sim.replay import CapacityReplay

from .cluster import STEPS_TO_FIRST_TOKEN
from .inputs import PlanInputs
from .replayed import Verified

TARGETS = {"target_iar": "admitted_at_once", "slo_ttft_s": "p95_ttft_s", "slo_tpot_s": "mean_tpot_s"}
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target in the replays of one kind of arrivals at one speed, judged at M*.

    target: a name of TARGETS.  goal, found: shares or seconds; found is None where no request was judged, and
    then so are held and missed_by.  missed_by: 0 where it is held.  held_from: the least of the replayed
    capacities from which on it is held, None if not at the largest.  unhindered_s: what the plan counts for a
    first token (P95), or for a token, at this speed where nothing waits for a slot; None for target_iar.
    attainable: that is within the goal.
    """

    target: str
    goal: float
    arrivals: str
    speed: str
    capacity: int
    most_tried: int
    found: float | None
    held: bool | None
    missed_by: float | None
    held_from: int | None
    unhindered_s: float | None
    attainable: bool


def verdicts(inputs: PlanInputs, capacity: int, found: Sequence[Verified]) -> list[Verdict]:
    """A verdict for each target, kind of arrivals and speed; by target.  found: what `verify` returns.

    capacity: M*, one of those replayed.
    """
    kinds = [list(kind) for _, kind in groupby(found, lambda one: (one.arrivals, one.speed))]
    return [_judged(inputs, target, capacity, kind) for target in TARGETS for kind in kinds]


def _judged(inputs: PlanInputs, target: str, capacity: int, kind: Sequence[Verified]) -> Verdict:
    goal, first = getattr(inputs, target), kind[0]
    missed = {one.replay.capacity: _missed_by(target, goal, one.replay) for one in kind}
    at = next(one.replay for one in kind if one.replay.capacity == capacity)
    short, least_s = missed[capacity], _unhindered_s(target, first.step_s)
    return Verdict(
        target=target,
        goal=goal,
        arrivals=first.arrivals,
        speed=first.speed,
        capacity=capacity,
        most_tried=max(missed),
        found=getattr(at, TARGETS[target]),
        held=None if short is None else short == 0,
        missed_by=short,
        held_from=_held_from(missed),
        unhindered_s=least_s,
        attainable=least_s is None or least_s <= goal * (1 + ROUNDING),
    )


def _missed_by(target: str, goal: float, replay: CapacityReplay) -> float | None:
    found: float | None = getattr(replay, TARGETS[target])
    if found is None:
        return None
    short = goal - found if target == "target_iar" else found - goal
    return short if short > ROUNDING * goal else 0.0


def _held_from(missed: dict[int, float | None]) -> int | None:
    held = None
    for capacity in sorted(missed, reverse=True):
        if missed[capacity] != 0:
            break
        held = capacity
    return held


def _unhindered_s(target: str, step_s: float) -> float | None:
    steps = {"slo_ttft_s": STEPS_TO_FIRST_TOKEN, "slo_tpot_s": 1.0}.get(target)
    return None if steps is None else steps * step_s
