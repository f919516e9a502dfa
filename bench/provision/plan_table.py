# SPDX-License-Identifier: Apache-2.0
"""Plans for the loads of InfiniLoRA's evaluation, beside the paper's own numbers.

    python -m bench.provision.plan_table --out bench/results/provision_plans.jsonl --markdown

One record per load, {case, plan, plan by the corrected estimator}, and one on section 6.3.2's admission rates
for Qwen3-30B-A3B.  Nothing is timed: equal inputs give equal plans.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.harness.records import environment
from moe_lora.core.errors import SloError
from moe_lora.provision.admission.admitted import rates_at
from moe_lora.provision.plan.plan import make_plan
from moe_lora.report.results import append_result

from .plan_cases import CASES, CONTEXT_TOKENS, OUTPUT_TOKENS, Case, case_inputs

QWEN_PAPER = {128: 0.830, 192: 0.922, 256: 1.0}
QWEN_TRIED = (
    ("as stated: 512 adapters, s = 1.2", 512, 1.2, 875.0),
    ("as stated: 512 adapters, s = 1.2", 512, 1.2, 980.0),
    ("256 adapters, s = 0.5", 256, 0.5, 1480.0),
)


def planned(case: Case, estimator: str) -> dict[str, Any]:
    """The plan as JSON, or the obstacle if the budget does not hold the load."""
    try:
        return asdict(make_plan(case_inputs(case, estimator=estimator)))
    except SloError as error:
        return {"error": str(error)}


def qwen_rates() -> dict[str, Any]:
    """IAR by both estimators at section 6.3.2's capacities, for inputs as stated and for others."""
    found = {}
    for name, num_adapters, s, global_batch in QWEN_TRIED:
        weights = np.arange(1, num_adapters + 1) ** -s
        probabilities = weights / weights.sum()
        found[f"{name}, global batch {global_batch:g}"] = {
            str(capacity): rates_at(probabilities, global_batch, capacity) for capacity in QWEN_PAPER
        }
    return {"paper": {str(capacity): rate for capacity, rate in QWEN_PAPER.items()}, "ours": found}


def row(case: Case, plans: dict[str, dict[str, Any]]) -> str:
    """One line of the table in docs/results/plans.md."""
    cells = [case.model, case.label, *(_cell(plans[name]) for name in ("paper", "corrected")), case.paper]
    return "| " + " | ".join(cells) + " |"


def _cell(plan: dict[str, Any]) -> str:
    if "error" in plan:
        return "does not fit"
    return (
        f"M* {plan['capacity']} ({plan['iar']:.1%} / {plan['iar_corrected']:.1%}): "
        f"{_counted(plan['lora_server_gpus'], 'GPU')}, {plan['layout']}, holds {plan['slots']}; "
        f"{_counted(plan['instances'], 'instance')}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@click.command()
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON lines; written anew.")
@click.option("--markdown", is_flag=True, help="Print the table of docs/results/plans.md.")
def main(out: str, markdown: bool) -> None:
    """Plan every case."""
    env = environment(out)  # before the old table goes, as its removal changes the tree
    Path(out).unlink(missing_ok=True)
    for case in CASES:
        plans = {name: planned(case, name) for name in ("paper", "corrected")}
        assumed = {"output_tokens": OUTPUT_TOKENS, "context_tokens": CONTEXT_TOKENS}
        append_result(out, config=asdict(case) | assumed, result=plans, env=env, kind="simulated")
        if markdown:
            click.echo(row(case, plans))
    rates = qwen_rates()
    append_result(
        out, config={"case": "Qwen3-30B-A3B, section 6.3.2"}, result=rates, env=env, kind="simulated"
    )
    if markdown:
        click.echo(rates)


if __name__ == "__main__":
    main()
