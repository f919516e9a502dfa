"""How `moe-lora provision --verify` checks a plan as it is written, and shows which targets it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lora.provision.plan.inputs import PlanInputs
    from moe_lora.provision.plan.plan import Plan
    from moe_lora.provision.plan.verify import Replay, Verdict

SEED = 1
"""Of arrivals and adapters; plans are chosen by others (`checked.SEEDS`)."""

_TARGETS = {
    "target_iar": "At once, at least {:.2%}",
    "slo_ttft_s": "P95 TTFT, at most {:.3f} s",
    "slo_tpot_s": "Mean TPOT, at most {:.4f} s",
}
_COLUMNS = ("at once", "waited for a slot", "waited for KV or batch", "P95 TTFT", "TPOT", "loads/s")


def verified(
    inputs: PlanInputs, plan: Plan, trace: str, format: str | None
) -> tuple[dict[str, Any], list[str], str]:
    """Replays and verdicts as JSON, as lines, and in a line what was missed; "" if nothing."""
    from moe_lora.provision.plan.checked import place_of, planned_rate
    from moe_lora.provision.plan.plan import cluster_of
    from moe_lora.provision.plan.verify import OTHER_DRAWS, holds, read_load, replays, verdicts

    place = place_of(plan)
    load = read_load(inputs, planned_rate(inputs, plan), trace, format, seed=SEED)
    found = replays(inputs, cluster_of(inputs), place.layout, place.num_instances, load)
    judged = verdicts(inputs, found, OTHER_DRAWS)
    held = holds(inputs, found, OTHER_DRAWS)
    content = {
        "verified": [asdict(one) for one in found],
        "verdicts": [asdict(verdict) for verdict in judged],
        "held": held,
    }
    tolerance = f"within {100 * OTHER_DRAWS.share:.0f} points and {OTHER_DRAWS.time:.0%}"
    lines = [*_replay_lines(found), "", f"Targets ({tolerance}):", *_verdict_lines(judged)]
    return content, lines, "" if held else _missed(judged)


def _replay_lines(found: Sequence[Replay]) -> list[str]:
    """A table for each kind of arrivals."""
    from moe_lora.provision.plan.verify import ARRIVALS

    lines = []
    for one in found:
        row = (
            _shown(one.admitted_at_once, ".2%"),
            _shown(one.waited_for_adapter, ".2%"),
            _shown(one.waited_for_room, ".2%"),
            _shown(one.p95_ttft_s, ".3f") + " s",
            _shown(one.mean_tpot_s, ".4f") + " s",
            _shown(one.loads_per_s, ".1f"),
        )
        heading = f"Checked by other draws, {ARRIVALS[one.arrivals]} ({one.num_requests} requests):"
        lines += ["", heading, _row(_COLUMNS), _row(row)]
    return lines


def _verdict_lines(judged: Sequence[Verdict]) -> list[str]:
    """A line a target, and one for each kind of arrivals that missed it."""
    from moe_lora.provision.plan.verify import missed_text

    lines = []
    for target, group in groupby(judged, lambda verdict: verdict.target):
        kinds = list(group)
        missed = [verdict for verdict in kinds if verdict.held is False]
        known = sum(verdict.held is not None for verdict in kinds)
        lines.append(f"{_TARGETS[target].format(kinds[0].goal)}: {_outcome(len(missed), known)}")
        lines += [f"  {missed_text(verdict)}" for verdict in missed]
    return lines


def _outcome(num_missed: int, num_judged: int) -> str:
    if num_judged == 0:
        return "not judged, as no request shows it"
    if num_missed == 0:
        return f"held in {num_judged} of {num_judged} kinds of arrivals"
    return f"missed in {num_missed} of {num_judged} kinds of arrivals"


def _missed(judged: Sequence[Verdict]) -> str:
    from moe_lora.provision.plan.verify import missed_text

    said = [missed_text(one) for one in judged if one.held is False]
    return f"This plan does not hold its own check: {'; '.join(said)}"


def _row(cells: Sequence[str]) -> str:
    widths = (max(10, len(name)) for name in _COLUMNS)
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
