"""The figure of bench_cache's simulated records: TTFT by its parts, and peak rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_lora.report.plots import color, label, new_figure

from .cache_plan import POLICIES

Record = dict[str, Any]
_PARTS = (
    ("queue_ms", "queue"),
    ("adapter_cold_ms", "LoRA cold start"),
    ("history_cold_ms", "KV cold start"),
    ("prefill_ms", "prefill"),
)
NUM_ADAPTERS, MODEL = 100, "7B"


def write_plot(records: Sequence[Record], path: Path) -> None:
    """7B with 100 adapters: an application per column, a policy per bar."""
    chosen = [
        record
        for record in records
        if record["kind"] == "simulated"
        and record["config"]["model"] == MODEL
        and record["config"]["num_adapters"] == NUM_ADAPTERS
    ]
    applications = list(dict.fromkeys(record["config"]["application"] for record in chosen)) or ["none"]
    figure, axes = new_figure(6.4, 2, len(applications))
    for column, application in enumerate(applications):
        by_policy = {
            record["config"]["policy"]: record["result"]
            for record in chosen
            if record["config"]["application"] == application
        }
        names = [name for name in POLICIES if name in by_policy]
        places = np.arange(len(names))
        bottom = np.zeros(len(names))
        for i, (key, title) in enumerate(_PARTS):
            # The middle one of the rates: at the highest some policies are beyond their peak.
            heights = np.array([_middle(by_policy[name])[key] for name in names], dtype=np.float64)
            axes[0, column].bar(places, heights, bottom=bottom, color=color(i), label=title)
            bottom += heights
        peaks = [by_policy[name]["peak_per_s"] for name in names]
        axes[1, column].bar(places, peaks, color=color(0))
        for row, y_label in ((0, "mean TTFT, ms"), (1, "peak requests/s")):
            label(axes[row, column], application if row == 0 else "", "", y_label if column == 0 else "")
            axes[row, column].set_xticks(places, names, rotation=60, ha="right", fontsize=8)
    axes[0, 0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _middle(result: dict[str, Any]) -> dict[str, Any]:
    points: list[dict[str, Any]] = result["points"]
    return points[len(points) // 2]
