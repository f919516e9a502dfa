"""The figure of bench_cluster's measured records: P95 TTFT by trace and system, one panel a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_lora.report.plot_style import FAILED, color, label, new_figure, nothing

from .cluster_plan import PADDED, TRUE_RANK
from .cluster_report import KERNEL_NAMES, PLACED_NAMES, Record, by_cell, of_section


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Bars of the placements at the load that most traces have; dashed: the SLO."""
    cells = by_cell(records)
    loads = [load for _, _, load in cells]
    common = max(loads, key=loads.count, default=0.0)
    figure, axes = new_figure(6.4, 2, 1, sharey=True)
    for row, kernel in enumerate((PADDED, TRUE_RANK)):
        axis = axes[row, 0]
        shown = {trace: of for (trace, own, load), of in cells.items() if own == kernel and load == common}
        places, width = np.arange(len(shown)), 0.8 / len(PLACED_NAMES)
        for i, name in enumerate(PLACED_NAMES):
            heights = [(of.get(name) or {}).get("p95_ttft_ms") or np.nan for of in shown.values()]
            axis.bar(places + (i - 2) * width, heights, width, color=color(i), label=name)
        if not shown:
            nothing(axis)
            continue
        axis.set_yscale("log")
        for found in of_section(records, "machine").values():
            axis.axhline(1e3 * found["slo_ttft_s"], color=FAILED, linestyle="--", linewidth=1)
        axis.set_xticks(places, list(shown), fontsize=8)
        label(axis, f"{KERNEL_NAMES[kernel]} kernel, load {common:g}", "", "P95 TTFT, ms")
    axes[0, 0].legend(fontsize=8, frameon=False, ncols=len(PLACED_NAMES))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
