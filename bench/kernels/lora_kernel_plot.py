"""Figure of the figure-19 records: latency (bars) and bandwidth (marks) by phase, a panel a shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from moe_lora.report.plots import COLORS, GRAY, color, label, new_figure

from .lora_kernel_plan import PHASES

Record = dict[str, Any]


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Write the figure in the format of the path's suffix.  Raises ValueError without figure-19 records."""
    shown = [r for r in records if r["config"]["group"] == "figure19" and "refused" not in r["result"]]
    if not shown:
        raise ValueError("no figure-19 record to plot; run a mode that measures some")
    panels = sorted({_panel(r) for r in shown})
    kernels = list(dict.fromkeys(r["config"]["kernel"] for r in shown))
    columns = 2
    num_rows = -(-len(panels) // columns)
    figure, axes = new_figure(2.9 * num_rows + 0.8, num_rows, columns)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for number, (axis, panel) in enumerate(zip(axes.flat, panels, strict=False)):
        _draw(axis, [r for r in shown if _panel(r) == panel], kernels, number % columns == columns - 1)
        model, site, equal, ranks = panel
        title = f"{model} {site}, " + (f"rank {ranks}" if equal else "mixed ranks")
        label(axis, title, "", "latency, ms" if number % columns == 0 else "")
    handles: list[Any] = [Patch(**_style(number), label=name) for number, name in enumerate(kernels)]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(record: Record) -> tuple[str, str, bool, str]:
    config = record["config"]
    return (
        config["model"],
        config["site"],
        config["equal_ranks"],
        "/".join(str(lora_rank) for lora_rank in config["lora_ranks"]),
    )


def _style(number: int) -> dict[str, Any]:
    """Colours first; hatched where they are used up."""
    hatched = number >= len(COLORS)
    return {"facecolor": color(number), "edgecolor": "white", "hatch": "///" if hatched else None}


def _draw(axis: Any, records: Sequence[Record], kernels: Sequence[str], last: bool) -> None:
    """Bars on a logarithmic latency axis; a diamond for the bandwidth on a second, linear axis."""
    right = axis.twinx()
    right.spines[["top", "left"]].set_visible(False)
    right.tick_params(colors=GRAY, labelsize=9)
    width = 0.8 / len(kernels)
    for record in records:
        config, result = record["config"], record["result"]
        number = kernels.index(config["kernel"])
        at = PHASES.index(config["phase"]) + (number - (len(kernels) - 1) / 2) * width
        axis.bar(at, result["time_ms"], width * 0.9, **_style(number))
        right.plot(
            at, result["bytes_per_s"] / 1e9, "D", color="white", markeredgecolor="black", markersize=4.5
        )
    copy = records[0]["result"]
    ceiling, noun = (copy["read_per_s"], "read") if "read_per_s" in copy else (copy["copy_per_s"], "copy")
    right.axhline(ceiling / 1e9, color=GRAY, linestyle=":", linewidth=1)
    right.text(2.45, ceiling / 1e9, noun, ha="right", va="bottom", fontsize=8, color=GRAY)
    right.set_ylim(0, max(ceiling, *(r["result"]["bytes_per_s"] for r in records)) / 1e9 * 1.15)
    axis.set_yscale("log")
    axis.set_xticks(range(len(PHASES)), PHASES)
    axis.set_xlim(-0.5, len(PHASES) - 0.5)
    if last:
        right.set_ylabel("◇ GB/s", fontsize=9.5)
