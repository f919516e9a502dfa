# SPDX-License-Identifier: Apache-2.0
"""Figure of `bench_engine`'s records: tokens/s by concurrency, one panel per dtype and adapter count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.harness.records import Record
from moe_lora.report.plots import GRAY, color, label, new_figure

SHORT_NAMES = {"bfloat16": "bf16", "float32": "fp32"}
# System -> (legend, colour number, line style).
STYLES = {
    "engine base": ("engine, base only", 5, "-"),
    "engine": ("engine, adapters on attention and experts", 0, "-"),
    "engine attention": ("engine, adapters on attention", 2, "-"),
    "transformers base": ("transformers, base only", 1, "--"),
    "peft mixed": ("peft mixed batch, adapters on attention", 4, "--"),
    "peft grouped": ("peft by adapter, adapters on attention and experts", 3, "--"),
}


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Write the figure in the format of the path's suffix."""
    dtypes = list(dict.fromkeys(r["config"]["dtype"] for r in records))
    # Cells with fewer requests use fewer adapters: take the cells with most requests.
    most = max(r["config"]["num_requests"] for r in records)
    counts = sorted(
        {r["config"]["cell_num_adapters"] for r in records if r["config"]["num_requests"] == most}
    )
    figure, axes = new_figure(3.3 * len(dtypes) + 1.1, len(dtypes), len(counts), sharex=True, sharey=True)
    requests = sorted({r["config"]["num_requests"] for r in records})
    for row, dtype in enumerate(dtypes):
        for column, count in enumerate(counts):
            axis = axes[row, column]
            _draw(axis, [r for r in records if r["config"]["dtype"] == dtype], count)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_locator(FixedLocator(requests))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            noun = "adapter" if count == 1 else "adapters"
            kind = SHORT_NAMES.get(dtype, dtype)
            title = f"{kind}, base" if count == 0 else f"{kind}, {count} {noun}"
            label(
                axis,
                title,
                "concurrent requests" if row == len(dtypes) - 1 else "",
                "decode tokens/s" if column == 0 else "",
            )
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper left", ncols=2, frameon=False, fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axis: Any, records: Sequence[Record], count: int) -> None:
    """One panel: a cell of fewer requests than adapters uses one adapter per request."""
    for system, (text, number, line) in STYLES.items():
        points = _points(records, system, count, "tokens_per_s")
        if points:
            axis.plot(
                *zip(*points, strict=True), line, marker="o", markersize=4, color=color(number), label=text
            )
    reference = "engine" if count else "engine base"
    points = _points(records, reference, count, "ceiling_tokens_per_s")
    if points:
        axis.plot(
            *zip(*points, strict=True), ":", color=GRAY, label="ceiling: bytes touched / read bandwidth"
        )


def _points(records: Sequence[Record], system: str, count: int, key: str) -> list[tuple[int, float]]:
    return sorted(
        (r["config"]["num_requests"], r["result"][key])
        for r in records
        if r["config"]["system"] == system
        and r["config"]["cell_num_adapters"] == min(count, r["config"]["num_requests"])
        and key in r["result"]
    )
