"""Whether replays of a cluster keep its three targets, and by how much they don't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .inputs import PlanInputs
from .verify import ARRIVALS, Replay

TARGETS = {"target_iar": "admitted_at_once", "slo_ttft_s": "p95_ttft_s", "slo_tpot_s": "mean_tpot_s"}
_NAMES = {"target_iar": "at once", "slo_ttft_s": "P95 TTFT", "slo_tpot_s": "mean TPOT"}
_AMOUNTS = {"target_iar": "{:.2%}", "slo_ttft_s": "{:.3f} s", "slo_tpot_s": "{:.4f} s"}
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far off a target still counts as held: points of a share, and a part of a time."""

    share: float = 0.0
    time: float = 0.0


STRICT = Tolerance()
OTHER_DRAWS = Tolerance(share=0.02, time=0.1)
"""For a check by other arrivals and adapters than those that a plan was chosen by."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target in the replay of one kind of arrivals.

    target: a name of TARGETS.  goal, found: shares or seconds; found is None where no request was judged, and
    then so are held and missed_by.  missed_by: 0 where the goal itself is kept.  held: within the tolerance.
    """

    target: str
    goal: float
    arrivals: str
    found: float | None
    held: bool | None
    missed_by: float | None


def verdicts(inputs: PlanInputs, replays: Sequence[Replay], tolerance: Tolerance = STRICT) -> list[Verdict]:
    """A verdict for each target and kind of arrivals; by target."""
    return [_judged(inputs, target, replay, tolerance) for target in TARGETS for replay in replays]


def holds(inputs: PlanInputs, replays: Sequence[Replay], tolerance: Tolerance = STRICT) -> bool:
    """Whether none of the replays was given up, and none missed a target."""
    judged = verdicts(inputs, replays, tolerance)
    return not any(one.stopped for one in replays) and all(one.held is not False for one in judged)


def missed_text(verdict: Verdict) -> str:
    """What was missed, by how much, and with which arrivals."""
    amount, missed_by = _AMOUNTS[verdict.target], verdict.missed_by or 0.0
    short = f"{100 * missed_by:.2f} points" if verdict.target == "target_iar" else amount.format(missed_by)
    found = amount.format(verdict.found)
    return f"{_NAMES[verdict.target]} missed by {short} ({found}) with {ARRIVALS[verdict.arrivals]}"


def _judged(inputs: PlanInputs, target: str, replay: Replay, tolerance: Tolerance) -> Verdict:
    goal: float = getattr(inputs, target)
    found: float | None = getattr(replay, TARGETS[target])
    held = missed_by = None
    if found is not None:
        share = target == "target_iar"
        allowed = tolerance.share if share else tolerance.time * goal
        short = goal - found if share else found - goal
        missed_by = short if short > ROUNDING * goal else 0.0
        held = missed_by <= allowed
    return Verdict(
        target=target, goal=goal, arrivals=replay.arrivals, found=found, held=held, missed_by=missed_by
    )
