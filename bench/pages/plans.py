# SPDX-License-Identifier: Apache-2.0
"""Plans beside InfiniLoRA's own numbers and beside a search by simulation: docs/results/plans.md."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from statistics import median
from typing import Any

from bench.provision.plan_cases import Case
from bench.provision.plan_table import row

from .evidence import records
from .markdown import table

FILE, CHECK_FILE = "provision_plans.jsonl", "plan_check.jsonl"


def plans() -> str:
    """A row a load: both models' plans, and the paper."""
    names = [one.name for one in fields(Case)]
    head = table(
        ("model", "load", "plan by the paper's model", "plan by the corrected one", "InfiniLoRA"), ()
    )
    rows = []
    for one in records(FILE, lambda config, result: "model" in config):
        case = Case(**{name: one["config"][name] for name in names})
        rows.append(row(case, one["result"]))
    return "\n".join([head, *rows])


def qwen() -> str:
    """Admission rates of section 6.3.2, beside the rates of both models."""
    (record,) = records(FILE, lambda config, result: "case" in config)
    paper = record["result"]["paper"]
    rows = [("InfiniLoRA's prediction", "–", *(f"{rate:.1%}" for rate in paper.values()))]
    for inputs, rates in record["result"]["ours"].items():
        for model in ("paper", "corrected"):
            rows.append((inputs, model, *(f"{rates[capacity][model]:.1%}" for capacity in paper)))
    return table(("inputs", "model", *paper), rows)


def checked() -> str:
    """A row a model: plans that hold under other draws, and the GPUs beside the least found."""
    by_model = defaultdict(list)
    for one in records(CHECK_FILE, lambda config, result: result["plan"] is not None):
        by_model[one["config"]["model"]].append(one["result"])
    head = (
        "model",
        "plans",
        "held",
        "without a tolerance",
        "least GPUs found",
        "one more",
        "two to four more",
    )
    rows = [_checked_row(model, found) for model, found in sorted(by_model.items())]
    rows.append(_checked_row("all", [one for found in by_model.values() for one in found]))
    return table((*head, "GPUs / bound, median", "coupled"), rows)


def _checked_row(model: str, found: list[dict[str, Any]]) -> tuple[str, ...]:
    more = [one["excess_gpus"] for one in found]
    ratios = [one["plan"]["total_gpus"] / one["plan"]["lower_bound"] for one in found]
    counts = (
        len(found),
        sum(one["held"] for one in found),
        sum(one["held_strictly"] for one in found),
        sum(one <= 0 for one in more),
        more.count(1),
        sum(one > 1 for one in more),
    )
    num_coupled = sum(one["plan"]["kind"] == "coupled" for one in found)
    return (model, *map(str, counts), f"{median(ratios):.2f}", str(num_coupled))
