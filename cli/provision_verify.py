"""How `moe-lora provision --verify` shows its replays, and whether they keep the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lora.provision.inputs import PlanInputs
    from moe_lora.provision.plan import Plan
    from moe_lora.provision.replayed import Verified
    from moe_lora.provision.verdicts import Verdict

_SPEEDS = {"sized": "steps as slow as sized for", "predicted": "steps as predicted"}
_ARRIVALS = {
    "trace": "the trace's own arrivals",
    "scaled": "the trace's arrivals scaled to the plan's rate",
    "poisson": "Poisson arrivals of the plan's rate",
}
_TARGETS = {
    "target_iar": "At once, at least {:.2%}",
    "slo_ttft_s": "P95 TTFT, at most {:.3f} s",
    "slo_tpot_s": "Mean TPOT, at most {:.4f} s",
}
_AMOUNTS = {"target_iar": "{:.2%}", "slo_ttft_s": "{:.3f} s", "slo_tpot_s": "{:.4f} s"}
_COLUMNS = ("adapters", "at once", "waited for a slot", "waited for KV or batch", "P95 TTFT", "TPOT")


def verified(
    inputs: PlanInputs, plan: Plan, trace: str, format: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Replays and verdicts, as JSON and as lines."""
    from moe_lora.provision.replayed import verify
    from moe_lora.provision.verdicts import verdicts

    found = verify(inputs, plan, trace, format)
    judged = verdicts(inputs, plan.capacity, found)
    replays = [
        {"speed": one.speed, "arrivals": one.arrivals, "step_s": one.step_s, **asdict(one.replay)}
        for one in found
    ]
    content = {"verified": replays, "verdicts": [asdict(verdict) for verdict in judged]}
    return content, [*_replay_lines(found), "", f"Targets at M* = {plan.capacity}:", *_verdict_lines(judged)]


def _replay_lines(found: Sequence[Verified]) -> list[str]:
    """A table for each kind of arrivals and speed, a line a capacity."""
    lines = []
    for (arrivals, speed), group in groupby(found, lambda one: (one.arrivals, one.speed)):
        replays = [one.replay for one in group]
        heading = f"Simulated, {_kind(arrivals, speed)} ({replays[0].num_requests} requests):"
        lines += ["", heading, _row(_COLUMNS)]
        lines += [
            _row(
                (
                    str(replay.capacity),
                    _shown(replay.admitted_at_once, ".2%"),
                    _shown(replay.waited_for_adapter, ".2%"),
                    _shown(replay.waited_for_room, ".2%"),
                    _shown(replay.p95_ttft_s, ".3f") + " s",
                    _shown(replay.mean_tpot_s, ".4f") + " s",
                )
            )
            for replay in replays
        ]
    return lines


def _verdict_lines(judged: Sequence[Verdict]) -> list[str]:
    """A line a target, and one for each kind of replay that missed it."""
    lines = []
    for target, group in groupby(judged, lambda verdict: verdict.target):
        kinds = list(group)
        missed = [verdict for verdict in kinds if verdict.held is False]
        known = sum(verdict.held is not None for verdict in kinds)
        name = _TARGETS[target].format(kinds[0].goal)
        lines.append(f"{name}: {_outcome(len(missed), known)}")
        lines += [f"  {_miss(verdict)}" for verdict in missed]
    return lines


def _outcome(num_missed: int, num_judged: int) -> str:
    if num_judged == 0:
        return "not judged, as no request shows it"
    if num_missed == 0:
        return f"held in {num_judged} of {num_judged} kinds of replay"
    return f"missed in {num_missed} of {num_judged} kinds of replay"


def _miss(verdict: Verdict) -> str:
    amount, kind = _AMOUNTS[verdict.target], _kind(verdict.arrivals, verdict.speed)
    missed, found = _short_by(verdict), amount.format(verdict.found)
    if verdict.held_from is not None:
        rest = f"held at {verdict.held_from} adapters"
    elif not verdict.attainable:
        alone = amount.format(verdict.unhindered_s)
        rest = f"can't be held at this speed: {alone} where nothing waits for a slot"
    else:
        rest = f"not held at {verdict.most_tried} adapters either"
    return f"missed by {missed} ({found}) with {kind}; {rest}"


def _short_by(verdict: Verdict) -> str:
    if verdict.target == "target_iar":
        return f"{100 * (verdict.missed_by or 0.0):.2f} points"
    return _AMOUNTS[verdict.target].format(verdict.missed_by)


def _kind(arrivals: str, speed: str) -> str:
    return f"{_ARRIVALS[arrivals]}, {_SPEEDS[speed]}"


def _row(cells: Sequence[str]) -> str:
    widths = (max(10, len(name)) for name in _COLUMNS)
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
