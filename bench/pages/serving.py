# SPDX-License-Identifier: Apache-2.0
"""Instances that are killed, take prompts alone or hold placed adapters."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from bench.cluster.cluster_report import first_tokens
from bench.harness.records import Record

from .evidence import Config, records
from .markdown import table

BEFORE, IMPORTS, SPARE, NO_SPARE = (
    "before",
    "fewer imports at start",
    "later code, a spare process",
    "later code, no spare process",
)
NO_SPARE_SETTING = "engine.spare_process=false"
CODE = {"2af820bb": BEFORE, "de7406cc": IMPORTS, "fa037b99": IMPORTS}
"""Commits without spare processes."""


def restarts() -> str:
    """Seconds from SIGKILL to a serving instance: median (slowest; kills), and the machine's load."""
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    loads: dict[str, list[float]] = defaultdict(list)
    for one in records("restart.jsonl"):
        name = _code(one)
        found[name, "--eager" in one["config"]["options"]].append(one["result"]["whole_s"])
        loads[name].append(one["result"]["load_1_min"])
    rows = [
        (name, _seconds(found[name, True]), _seconds(found[name, False]), _range(loads[name]))
        for name in (BEFORE, IMPORTS, NO_SPARE, SPARE)
    ]
    return table(("", "`--eager`", "compiled", "load of the machine"), rows)


def two_kills() -> str:
    """Requests around two kills: medians over rounds (worst), and the machine's load."""
    found: dict[bool, list[Config]] = defaultdict(list)
    for one in records("two_kills.jsonl"):
        found[NO_SPARE_SETTING not in one["config"]["options"]].append(one["result"])
    rows = [
        (
            f"{'a' if spare else 'no'} spare process, {len(rounds)} rounds",
            _worst([100 * one["share_503"] for one in rounds], " %"),
            *(_worst([one[key] for one in rounds], " s") for key in ("longest_gap_s", "p99_s")),
            _range([one["load_1_min"] for one in rounds]),
        )
        for spare, rounds in found.items()
    ]
    return table(("", "503", "longest time without an answer", "P99 of an answer", "load"), rows)


def elastic() -> str:
    """Requests of each phase while instances join and leave."""
    return _phases("elastic.jsonl")


def layouts() -> str:
    """Requests of each phase while a LoRA Server's layout changes."""
    return _phases("elastic_layouts.jsonl")


def prompt_handoff() -> str:
    """Seconds to the first and from it to the second token, by the link's share of compute and by way."""
    found: dict[tuple[float, str], list[Config]] = defaultdict(list)
    for one in records("prompt_handoff.jsonl"):
        found[one["config"]["ratio"], one["config"]["way"]].append(one["result"])
    rows = [
        (f"{ratio:g}", way, *(_worst([one[key] for one in rounds], "", 2) for key in ("first_s", "second_s")))
        for (ratio, way), rounds in sorted(found.items())
    ]
    return table(("link over compute", "KV goes", "first token, s", "from first to second, s"), rows)


def cluster() -> str:
    """P95 TTFT by trace, kernel and load, and by system."""
    return first_tokens(records("cluster.jsonl"))


def prefill_first() -> str:
    """Gaps and first tokens while long prompts arrive: the first round, and the median of the later ones."""
    found: dict[tuple[str, str], list[Config]] = defaultdict(list)
    for one in records("prefill_first.jsonl"):
        which = "later" if one["config"]["round"] else "first"
        found[which, one["config"]["way"]].append(one["result"])
    gaps = "gap_p50_s", "gap_p99_s", "gap_p999_s"
    rows = [
        (
            *key,
            *(f"{1000 * median(one[gap] for one in rounds):.0f}" for gap in gaps),
            f"{median(one['tokens_per_s'] for one in rounds):.0f}",
            *(f"{median(one[first] for one in rounds):.1f}" for first in ("first_p50_s", "first_p95_s")),
        )
        for key, rounds in found.items()
    ]
    head = "round", "two instances", "gap P50, ms", "P99", "P99.9", "tokens/s of streams"
    return table((*head, "first token P50, s", "P95"), rows)


def _phases(name: str) -> str:
    """Of all runs of a record: medians (worst) of TTFT P95, beside the first phase."""
    found = records(name)
    runs, rows = [one["result"]["phases"] for one in found], []
    first = next(iter(runs[0]))
    for name in runs[0]:
        here = [phases[name] for phases in runs]
        ratios = [phases[name]["ttft_p95_s"] / phases[first]["ttft_p95_s"] for phases in runs]
        rows.append(
            (
                name,
                *(str(sum(one[key] for one in here)) for key in ("requests", "failed")),
                _worst([one["ttft_p95_s"] for one in here], " s", 2),
                _worst(ratios, "", 2),
            )
        )
    load = _range([one["result"]["load_1_min"] for one in found])
    return table(
        (f"{len(runs)} runs, load {load}", "requests", "failed", "TTFT P95", f"of the P95 at {first}"), rows
    )


def _worst(values: list[float], unit: str, digits: int = 1) -> str:
    return f"{median(values):.{digits}f} ({max(values):.{digits}f}){unit}"


def _code(record: Record) -> str:
    commit, options = str(record["env"].get("git_commit")), record["config"]["options"]
    return CODE.get(commit[:8], NO_SPARE if NO_SPARE_SETTING in options else SPARE)


def _seconds(values: list[float]) -> str:
    return f"{median(values):.1f} ({max(values):.1f}; {len(values)})"


def _range(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
