# SPDX-License-Identifier: Apache-2.0
"""How `moe-lora provision --verify` checks a plan as it is written, and shows which targets it keeps.

For a plan with all targets kept, latencies of the second simulator follow and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from moe_lora.provision.plan.inputs import PlanInputs, SizedCluster
    from moe_lora.provision.plan.plan import Plan
    from moe_lora.provision.plan.two_simulators import Latencies
    from moe_lora.provision.plan.verify import Replay, Verdict
    from moe_lora.workload.traces.records import Trace

SEED = 1
"""Of arrivals and adapters; plans are chosen by others (`checked.SEEDS`)."""
_SHOWN_EVERY = 50
"""Requests."""

_COLUMNS = (
    *("at once", "waited for a slot", "waited for KV or batch"),
    *("P95 TTFT", "P95 decode TTFT", "TPOT", "loads/s"),
)


def verified(inputs: PlanInputs, plan: Plan, trace: Trace) -> tuple[dict[str, Any], list[str], str]:
    """Replays and verdicts as JSON, as lines, and in a line what was missed; "" if nothing."""
    from moe_lora.provision.plan.checked import place_of, planned_rate
    from moe_lora.provision.plan.cluster_size import Cluster
    from moe_lora.provision.plan.verify import OTHER_DRAWS, holds, planned_load, replays, verdicts

    place, rate_per_s = place_of(plan), planned_rate(inputs, plan)
    load = planned_load(inputs, rate_per_s, trace, seed=SEED)
    try:
        found = replays(Cluster(inputs), place, load)
    except KeyboardInterrupt:
        return {"held": None}, [], "This plan was not checked: Ctrl-C stopped the check"
    judged = verdicts(inputs, found, OTHER_DRAWS)
    held = holds(inputs, found, OTHER_DRAWS)
    content = {
        "verified": [asdict(one) for one in found],
        "verdicts": [asdict(verdict) for verdict in judged],
        "held": held,
    }
    tolerance = f"within {100 * OTHER_DRAWS.share:.0f} points and {OTHER_DRAWS.time:.0%}"
    lines = [*_replay_lines(found), "", f"Targets ({tolerance}):", *_verdict_lines(judged)]
    if not held:
        return content, lines, _missed(judged)
    simulators, shown = _both_simulators(inputs, place, rate_per_s, trace)
    return content | {"simulators": simulators}, [*lines, "", *shown], ""


def _both_simulators(
    inputs: PlanInputs, place: SizedCluster, rate_per_s: float, trace: Trace
) -> tuple[list[dict[str, Any]], list[str]]:
    """Latencies of both simulators as JSON and lines, or a line with the reason."""
    from moe_lora.core.errors import CapacityError
    from moe_lora.core.progress import progress
    from moe_lora.provision.plan.two_simulators import FAST, NOT_REPLAYED, REAL, both, num_replayed
    from moe_lora.provision.plan.verify import ARRIVALS

    number = num_replayed(inputs)
    try:
        with progress(lambda line: click.echo(line, err=True)) as write:

            def show(done: int, total: int) -> None:
                if done % _SHOWN_EVERY == 0:
                    write(f"{REAL}: {done}/{total} requests", done, total)

            found = both(inputs, place, rate_per_s, trace, num_requests=number, seed=SEED, show=show)
    except KeyboardInterrupt:
        return [], [f"{REAL}: Ctrl-C stopped the replay of {number} requests"]
    except CapacityError as error:
        return [], [f"{REAL} can't replay this plan: {error}"]
    heading = f"{FAST} and {REAL}, {ARRIVALS['poisson']} ({number} requests):"
    lines = [heading, *_latency_lines(found), f"{REAL} does not replay {NOT_REPLAYED}."]
    if inputs.prompts is not None and inputs.prompts.stated:
        share = f"{inputs.prompts.hit_share:.1%}"
        lines.append(f"In {REAL} the stated {share} are one prefix an adapter, and its first prompt misses.")
    return [asdict(one) for one in found], lines


def _latency_lines(found: Sequence[Latencies]) -> list[str]:
    columns = (
        *("P50 TTFT", "P95 TTFT", "P99 TTFT", "mean TPOT", "P95 TPOT"),
        *("within SLOs", "prefix hits"),
    )
    lines = [f"{'simulator':<20}" + "".join(name.rjust(13) for name in columns)]
    for one in found:
        ttft = (_seconds(value, ".3f") for value in (one.p50_ttft_s, one.p95_ttft_s, one.p99_ttft_s))
        tpot = (_seconds(value, ".4f") for value in (one.mean_tpot_s, one.p95_tpot_s))
        cells = (*ttft, *tpot, _shown(one.in_slo, ".2%"), _shown(one.prefix_hits, ".1%"))
        lines.append(f"{one.simulator:<20}" + "".join(cell.rjust(13) for cell in cells))
    return lines


def _replay_lines(found: Sequence[Replay]) -> list[str]:
    """A table for each kind of arrivals."""
    from moe_lora.provision.plan.verify import ARRIVALS

    lines = []
    for one in found:
        row = (
            _shown(one.admitted_at_once, ".2%"),
            _shown(one.waited_for_adapter, ".2%"),
            _shown(one.waited_for_room, ".2%"),
            _seconds(one.p95_ttft_s, ".3f"),
            _seconds(one.p95_decode_ttft_s, ".3f"),
            _seconds(one.mean_tpot_s, ".4f"),
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


def _seconds(value: float | None, form: str) -> str:
    return _shown(value, form) + " s"


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
