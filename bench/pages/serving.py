# SPDX-License-Identifier: Apache-2.0
"""Restarts of instances: docs/results/serving.md."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from bench.harness.records import Record

from .evidence import records
from .markdown import table

BEFORE, IMPORTS, SPARE, NO_SPARE = (
    "before",
    "fewer imports at start",
    "later code, a spare process",
    "later code, no spare process",
)
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


def _code(record: Record) -> str:
    commit, options = str(record["env"].get("git_commit")), record["config"]["options"]
    return CODE.get(commit[:8], NO_SPARE if "engine.spare_process=false" in options else SPARE)


def _seconds(values: list[float]) -> str:
    return f"{median(values):.1f} ({max(values):.1f}; {len(values)})"


def _range(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
