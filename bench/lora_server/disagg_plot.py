"""Figures of `bench_disagg`'s records."""

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


def write_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """One figure per part and arrivals that the records hold; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for arrivals in ("poisson", "trace"):
        chosen = [r for r in _part(records, "rates") if r["config"]["arrivals"] == arrivals]
        if chosen:
            paths.append(_save(_rates(chosen), folder / f"disagg_{arrivals}.png"))
    for part, name in (("cache ratio", "disagg_cache_ratio.png"), ("ablation", "disagg_ablation.png")):
        chosen = _part(records, part)
        if chosen:
            paths.append(_save(_bars(chosen, part), folder / name))
    return paths


def _part(records: Sequence[Record], part: str) -> list[Record]:
    return [r for r in records if r["config"]["part"] == part]


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    return path


def _rates(records: Sequence[Record]) -> Any:
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
        _target(axis, target)
        if field == "p95_decode_ttft_ms":
            axis.set_yscale("log")
        label(axis, title, "requests/s", "")
    handles, texts = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        handles, texts, loc="outside upper left", ncols=3, frameon=False, fontsize=9, title="emulated devices"
    )
    return figure


def _bars(records: Sequence[Record], part: str) -> Any:
    """A bar per system, in the order in which they ran."""
    figure, axes = new_figure(5.6, 2, 2)
    names = [r["config"]["system"]["name"].removeprefix("cache ratio ") for r in records]
    for (field, title, factor, target), axis in zip(_PANELS, axes.flat, strict=True):
        values = [factor * (r["result"][field] or 0.0) for r in records]
        axis.bar(range(len(names)), values, color=color(0), width=0.6)
        axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
        _target(axis, target)
        rate = records[0]["config"]["rate_per_s"]
        label(axis, title, f"{part}, {rate:g} requests/s (emulated)", "")
    return figure


def _target(axis: Any, target: float | None) -> None:
    if target is not None:
        axis.axhline(target, color=FAILED, linewidth=1, linestyle="--")
