# SPDX-License-Identifier: Apache-2.0
"""Plans beside InfiniLoRA's own numbers, from provision_plans.jsonl: docs/results/plans.md."""

from __future__ import annotations

from dataclasses import fields

from bench.provision.plan_cases import Case
from bench.provision.plan_table import row

from .evidence import records
from .markdown import table

FILE = "provision_plans.jsonl"


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
