# SPDX-License-Identifier: Apache-2.0
"""How `moe-lora provision --verify` checks a plan as it is written, and shows which targets it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lora.provision.plan.inputs import PlanInputs
    from moe_lora.provision.plan.plan import Plan
    from moe_lora.provision.plan.verify import Replay, Verdict
    from moe_lora.workload.traces.records import Trace

SEED = 1
"""Of arrivals and adapters; plans are chosen by others (`checked.SEEDS`)."""

_COLUMNS = (
    *("at once", "waited for a slot", "waited for KV or batch"),
    *("P95 TTFT", "P95 decode TTFT", "TPOT", "loads/s"),
)


def verified(inputs: PlanInputs, plan: Plan, trace: Trace) -> tuple[dict[str, Any], list[str], str]:
    """Replays and verdicts as JSON, as lines, and in a line what was missed; "" if nothing."""
    from moe_lora.provision.plan.checked import place_of, planned_rate
    from moe_lora.provision.plan.cluster_size import Cluster
    from moe_lora.provision.plan.verify import OTHER_DRAWS, holds, planned_load, replays, verdicts

    place = place_of(plan)
    load = planned_load(inputs, planned_rate(inputs, plan), trace, seed=SEED)
    found = replays(Cluster(inputs), place, load)
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
            _shown(one.p95_decode_ttft_s, ".3f") + " s",
            _shown(one.mean_tpot_s, ".4f") + " s",
            _shown(one.loads_per_s, ".1f"),
        )
        heading = f"Checked by other draws, {ARRIVALS[one.arrivals]} ({one.num_requests} requests):"
        lines += ["", heading, _row(_COLUMNS), _row(row)]
    return lines


def _verdict_lines(judged: Sequence[Verdict]) -> list[str]:
    """A line a target, and one for each kind of arrivals that missed it."""
    from moe_lora.provision.plan.verify import TARGETS, missed_texts

    lines = []
    for target in TARGETS:
        kinds = [verdict for verdict in judged if verdict.target == target.goal]
        missed = missed_texts(kinds)
        known = sum(verdict.held is not None for verdict in kinds)
        outcome = f"{'missed' if missed else 'held'} in {len(missed) or known} of {known} kinds of arrivals"
        wanted = f"at {'least' if target.share else 'most'} {target.form.format(kinds[0].goal)}"
        name = target.name[0].upper() + target.name[1:]
        lines.append(f"{name}, {wanted}: {outcome if known else 'not judged, as no request shows it'}")
        lines += [f"  {text}" for text in missed]
    return lines


def _missed(judged: Sequence[Verdict]) -> str:
    from moe_lora.provision.plan.verify import missed_texts

    return f"This plan does not hold its own check: {'; '.join(missed_texts(judged))}"


def _row(cells: Sequence[str]) -> str:
    widths = (max(10, len(name)) for name in _COLUMNS)
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
