"""What all figures of the report share: colours, axes, ticks and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Okabe and Ito's colours, told apart also with colour-blind eyes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GRAY, LIGHT, FAILED = "#5f6770", "#dfe3e8", "#b00020"
_WIDTH_IN = 9.0


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def new_figure(
    height_in: float, num_rows: int = 1, num_columns: int = 1, **subplots: Any
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=150, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **subplots)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(GRAY)
        axis.tick_params(colors=GRAY, labelsize=9)
        axis.grid(True, color=LIGHT, linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def label(axis: Axes, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel(x_label, fontsize=9.5)
    axis.set_ylabel(y_label, fontsize=9.5)


def ms_text(value: float, _: object = None) -> str:
    """Milliseconds as a tick shows them; whole seconds from 1000 on."""
    return f"{value:g}" if value < 1e3 else f"{value / 1e3:g} s"


def nothing(axis: Axes) -> None:
    axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", va="center", color=GRAY)


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Ticks at 1, 2, 5 (over more than two decades: 1) times powers of ten; milliseconds."""
    steps = (1,) if high / low > 200 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(-3, 8) for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(ms_text))


def run_legend(figure: Figure, runs: Sequence[dict[str, Any]]) -> None:
    """Which colour is which run; nothing for a single one."""
    if len(runs) > 1:
        handles = [
            Line2D([], [], color=color(i), linewidth=2, label=run["label"]) for i, run in enumerate(runs)
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=9.5)
