# SPDX-License-Identifier: Apache-2.0
"""Models of step times, from performance_model.jsonl: docs/results/performance_models.md."""

from __future__ import annotations

from typing import Any

from bench.harness.records import Record

from .evidence import records
from .markdown import table

FILE = "performance_model.jsonl"
FORMS = {"toppings": "equation 2", "full": "full"}
MIXES = {"one high": "one of rank 128", "half high": "half", "all high": "all"}


def _part(part: str) -> list[Record]:
    return records(FILE, lambda config, result: config["part"] == part)


def quality() -> str:
    """R² and mean error on batches held out."""
    found: dict[str, dict[str, str]] = {}
    for one in _part("models"):
        for phase, fit in one["result"]["quality"].items():
            column = f"{FORMS[one['config']['form']]}, {phase}"
            cell = f"{fit['r2_held_out']:.3f} ({100 * fit['mean_error']:.1f} %)"
            found.setdefault(one["config"]["kernel"], {})[column] = cell
    columns = [f"{form}, {phase}" for form in FORMS.values() for phase in ("decode", "prefill")]
    rows = [(kernel, *(cells[column] for column in columns)) for kernel, cells in found.items()]
    return table(("kernel", *columns), rows)


def mixing() -> str:
    """Steps of mixed ranks over steps of rank 8."""
    rows = [
        (one["config"]["kernel"], *(_ratio(one["result"][mix]["of_low_alone"]) for mix in MIXES))
        for one in _part("mixing")
    ]
    return table(("kernel", *MIXES.values()), rows)


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['median']:.2f} ({found['p25']:.2f}–{found['p75']:.2f})"


def points() -> str:
    """Operating points, measured and simulated."""
    rows = []
    for one in _part("points"):
        rates = one["result"]["operating_points"]
        rows.append(
            (f"{one['config']['kernel']}, {one['kind']}", *(f"{rate:.0f}" for rate in rates.values()))
        )
    return table(("kernel", *(f"rank {rank}" for rank in rates)), rows)
