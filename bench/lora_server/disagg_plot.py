# SPDX-License-Identifier: Apache-2.0
"""The figure of `bench_disagg`'s records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_lora.report.latency import SloTargets
from moe_lora.report.plots import FAILED, color, label, new_figure

Record = dict[str, Any]

_SLO = SloTargets()
# Field, title, factor, target.
_PANELS: tuple[tuple[str, str, float, float | None], ...] = (
    ("p95_decode_ttft_ms", "P95 decode TTFT, ms", 1.0, 1e3 * _SLO.ttft_s),
    ("mean_tpot_ms", "mean TPOT, ms", 1.0, 1e3 * _SLO.tpot_s),
    ("window_output_throughput", "output tokens/s", 1.0, None),
    ("slo_attainment_adapters_decode_ttft", "adapters in SLO, %", 100.0, None),
)


def write_plot(records: Sequence[Record], folder: Path) -> Path:
    """Latency and SLO attainment over the rate of Poisson arrivals, of every system in the records."""
    records = [r for r in records if r["config"]["part"] == "rates" and r["config"]["arrivals"] == "poisson"]
    figure, axes = new_figure(6.4, 2, 2)
    names = sorted(
        {r["config"]["system"]["name"] for r in records}, key=lambda name: (name != "disaggregated", name)
    )
    for (field, title, factor, target), axis in zip(_PANELS, axes.flat, strict=True):
        for i, name in enumerate(names):
            chosen = [r for r in records if r["config"]["system"]["name"] == name]
            points = sorted(
                (r["config"]["rate_per_s"], factor * r["result"][field])
                for r in chosen
                if r["result"][field] is not None
            )
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color(i), label=name)
        if target is not None:
            axis.axhline(target, color=FAILED, linewidth=1, linestyle="--")
        if field == "p95_decode_ttft_ms":
            axis.set_yscale("log")
        label(axis, title, "requests/s", "")
    handles, texts = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        handles, texts, loc="outside upper left", ncols=3, frameon=False, fontsize=9, title="emulated devices"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "disagg_poisson.png"
    figure.savefig(path)
    return path
