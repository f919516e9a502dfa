# SPDX-License-Identifier: Apache-2.0
"""LoRA kernels on a CPU beside the machine's limits, from lora_kernels.jsonl: docs/results.md."""

from __future__ import annotations

from bench.kernels.lora_kernel_report import verdicts

from .evidence import records
from .markdown import table

FILE = "lora_kernels.jsonl"


def on_cpu() -> str:
    """A row a goal: the cases that meet it, and the worst.  Last: deltas beside the best other contestant."""
    found = records(FILE, lambda config, result: config["device"] == "cpu")
    rows = []
    for one in verdicts(found):
        met = f"{one.num_met} of {one.num_cases}"
        shown = met if one.met else f"**{met}**"
        rows.append((one.goal.name, f"{one.goal.limit:g}", shown, f"{one.worst:.2f}: {one.worst_case}"))
    over = sorted(
        (min(other["median"] for other in one["result"]["speedup_over"].values()), one["config"]["case"])
        for one in found
        if one["config"]["role"] == "ours"
        and one["config"]["phase"] == "delta"
        and one["result"].get("speedup_over")
    )
    won, (worst, case) = sum(ratio >= 1 for ratio, _ in over), over[0]
    best = "times the best other contestant's speed, padded and per-row baselines included"
    rows.append((best, "–", f"{won} of {len(over)} at 1 or more", f"{worst:.2f}: {case}"))
    return table(("", "goal", "cases that meet it", "worst case"), rows)
