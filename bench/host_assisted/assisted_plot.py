# SPDX-License-Identifier: Apache-2.0
"""The figure of `bench_host_assisted`'s records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from bench.harness.records import Record
from moe_lora.report.plots import FAILED, color, label, new_figure

from .assisted_plan import ASYNCHRONOUS, CACHED, ON_DEMAND, OURS, SYSTEMS
from .assisted_report import over

_WIDTH = 0.26


def write_plot(records: Sequence[Record], path: Path) -> Path:
    """TTFT and time per token over those of cached in every setting, the sweep, decoding interruptions."""
    figure, axes = new_figure(7.2, 2, 2)
    whole = [one for one in records if ON_DEMAND in one["result"]["rounds"]]
    _bars(axes.flat[0], whole, "ttft_s", "TTFT over cached")
    _bars(axes.flat[1], whole, "tpt_s", "time per token over cached")
    _sweep(axes.flat[2], records)
    _interruptions(axes.flat[3], whole)
    handles, texts = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper left", ncols=3, frameon=False, title="emulated device")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _bars(axis: Axes, records: Sequence[Record], key: str, title: str) -> None:
    for i, system in enumerate((ON_DEMAND, ASYNCHRONOUS, OURS)):
        ratios = [over(one, key, system, CACHED) for one in records]
        places = [place + (i - 1) * _WIDTH for place in range(len(records))]
        median = [one["median"] for one in ratios]
        spread = [
            [one["median"] - one["min"] for one in ratios],
            [one["max"] - one["median"] for one in ratios],
        ]
        axis.bar(places, median, _WIDTH, yerr=spread, color=color(SYSTEMS.index(system)), label=system)
    axis.axhline(1.0, color=FAILED, linewidth=1, linestyle="--")
    names = [one["config"]["name"].replace(", ", "\n") for one in records]
    axis.set_xticks(range(len(records)), names, fontsize=7, rotation=45)
    label(axis, title, "", "")


def _sweep(axis: Axes, records: Sequence[Record]) -> None:
    """TTFT of asynchronous loads and of ours over cached, by load time and cores."""
    swept = [r for r in records if r["config"].get("name", "").split(",")[0] == "S3"]
    swept = [r for r in swept if not r["config"]["all_sites"]]
    for cores, style in ((1.0, "-"), (0.25, ":")):
        chosen = sorted(
            (one for one in swept if one["config"]["cores"] == cores), key=lambda one: one["config"]["load"]
        )
        for system in (ASYNCHRONOUS, OURS):
            points = [
                (one["config"]["load"], over(one, "ttft_s", system, CACHED)["median"]) for one in chosen
            ]
            if points:
                text = f"{system}, {cores:g} of the cores"
                at = color(SYSTEMS.index(system))
                axis.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=at, label=text)
    axis.set_xscale("log", base=2)
    axis.legend(frameon=False, fontsize=7)
    label(axis, "S3: TTFT over cached", "load time over a prompt's prefill", "")


def _interruptions(axis: Axes, records: Sequence[Record]) -> None:
    wanted = [one for one in records if one["config"]["name"] in ("3 requests/s", "S2", "S3")]
    wanted.sort(key=lambda one: one["config"]["utilisation"])
    for i, system in enumerate((ON_DEMAND, ASYNCHRONOUS, OURS)):
        shares = [
            100 * statistics.median(r["interrupted"] for r in one["result"]["rounds"][system])
            for one in wanted
        ]
        places = [place + (i - 1) * _WIDTH for place in range(len(wanted))]
        axis.bar(places, shares, _WIDTH, color=color(SYSTEMS.index(system)))
    axis.set_xticks(range(len(wanted)), [one["config"]["name"] for one in wanted])
    label(axis, "decoding interrupted, % of a request's time", "", "")
