# SPDX-License-Identifier: Apache-2.0
"""LoRA kernels on a CPU beside the machine's limits, from lora_kernels.jsonl: docs/results.md."""

from __future__ import annotations

from bench.kernels.lora_kernel_report import verdicts

from .evidence import records
from .markdown import table


def on_cpu() -> str:
    """A row a goal: the cases that meet it, and the worst."""
    rows = []
    for one in verdicts(records("lora_kernels.jsonl")):
        goal, met = one.goal, f"{one.num_met} of {one.num_cases}"
        shown = met if one.met else f"**{met}**"
        rows.append((goal.name, f"{goal.limit:g}", shown, f"{one.worst:.2f}: {one.worst_case}"))
    return table(("", "goal", "cases that meet it", "worst case"), rows)
