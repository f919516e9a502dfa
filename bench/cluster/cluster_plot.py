# SPDX-License-Identifier: Apache-2.0
"""The figure of bench_cluster's measured records: P95 TTFT by trace and system, a panel for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.harness.records import Record
from moe_lora.report.plots import FAILED, color, label, log_ticks, new_figure, nothing

from .cluster_plan import PADDED, TRUE_RANK
from .cluster_report import KERNEL_NAMES, PLACED_NAMES, by_cell, of_section

_SPREAD = 0.1
"""Between the marks of a trace's systems, at distance 1."""


def write_plot(records: Sequence[Record], path: Path) -> None:
    """A mark per system, at the most common load; dashed: the SLO."""
    cells = by_cell(records)
    loads = [load for _, _, load in cells]
    common = max(loads, key=loads.count, default=0.0)
    slo_ms = [1e3 * found["slo_ttft_s"] for found in of_section(records, "machine").values()]
    figure, axes = new_figure(6.4, 2, 1, sharey=True)
    seen_ms = slo_ms[:1]
    for row, kernel in enumerate((PADDED, TRUE_RANK)):
        axis = axes[row, 0]
        shown = {trace: of for (trace, own, load), of in cells.items() if own == kernel and load == common}
        places = np.arange(len(shown))
        for i, name in enumerate(PLACED_NAMES):
            times_ms = [(of.get(name) or {}).get("p95_ttft_ms") or np.nan for of in shown.values()]
            seen_ms += [time for time in times_ms if np.isfinite(time)]
            shift = (i - (len(PLACED_NAMES) - 1) / 2) * _SPREAD
            axis.plot(places + shift, times_ms, "o", color=color(i), label=name)
        if not shown:
            nothing(axis)
        axis.set_yscale("log")
        for limit_ms in slo_ms[:1]:
            axis.axhline(limit_ms, color=FAILED, linestyle="--", linewidth=1, label="SLO")
        axis.set_xticks(places, list(shown), fontsize=8)
        axis.set_xlim(-0.5, max(1, len(shown)) - 0.5)
        label(axis, f"{KERNEL_NAMES[kernel]} kernel, load {common:g}", "", "P95 TTFT")
    low, high = 0.8 * min(seen_ms, default=1.0), 1.25 * max(seen_ms, default=10.0)
    axes[0, 0].set_ylim(low, high)
    for axis in axes.flat:
        log_ticks(axis.yaxis, low, high)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=6, frameon=False, fontsize=8.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
