"""A provisioning plan as one HTML file, with its plots inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .html import png
from .plot_style import GRAY, color, label, new_figure
from .results import write_text

Curves = Mapping[str, Sequence[tuple[int, float]]]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #1c2530; background: #f4f6f8; margin: 0; }
 main { max-width: 980px; margin: 0 auto; padding: 24px 20px 60px; }
 h2 { font-size: 18px; margin: 34px 0 10px; }
 img { width: 100%; background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; }
 pre { white-space: pre-wrap; font-size: 13px; background: #fff; border: 1px solid #dfe3e8; padding: 12px; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<pre>{{ text }}</pre>
{% for heading, image in figures %}
<h2>{{ heading }}</h2>
<img alt="{{ heading }}" src="data:image/png;base64,{{ image }}">
{% endfor %}
<h2>Words</h2>
<p>{{ words }}</p>
<h2>The plan as JSON</h2>
<pre>{{ content }}</pre>
</main>
</body>
</html>
"""


_WORDS = (
    "IAR (immediate admissibility rate): the share of requests that start at once, because their adapter is "
    "resident or there is room for it. M*: the fewest resident adapters that bring it to the target. The "
    "paper's model (InfiniLoRA, arXiv 2604.07173, section 4.2) takes adapters as independent of each other, "
    "the corrected one lets requests wait. EPx-PPy: experts over x ranks, layers over y stages. What binds "
    "is the constraint that needs most GPUs: adapters in memory, waits for adapters that are being loaded, "
    "the first token's time, eq5 (a layer's LoRA "
    "round within what attention leaves), eq6 (the slowest part of it for all instances in turn). TTFT: to "
    "the first decoded token, without prefill; TPOT: between tokens. Times are predicted or simulated, not "
    "measured."
)


def write_plan_report(
    path: str | Path, plan: Mapping[str, Any], lines: Sequence[str], curves: Curves
) -> None:
    """Write the page; it opens without a network.

    plan: `Plan.to_json()`.  lines: the plan in words.  curves: (capacity, IAR) points by estimator.
    """
    figures = (
        ("Requests that start at once, by capacity", iar_figure(plan, curves)),
        ("LoRA Server GPUs that each constraint needs", gpus_figure(plan)),
    )
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_PAGE).render(
        title=f"Plan: {plan['inputs']['model']}",
        text="\n".join(lines),
        words=_WORDS,
        figures=[(heading, png(figure)) for heading, figure in figures],
        content=json.dumps(plan, indent=1),
    )
    write_text(path, page)


def iar_figure(plan: Mapping[str, Any], curves: Curves) -> Figure:
    """IAR over capacity by each estimator, with the target, M* and what the server holds."""
    figure, axes = new_figure(3.9)
    axis = axes[0, 0]
    for index, (name, points) in enumerate(curves.items()):
        capacities, rates = zip(*points, strict=True)
        axis.plot(capacities, rates, color=color(index), linewidth=1.8, label=f"{name} model")
    axis.axhline(plan["inputs"]["target_iar"], color=GRAY, linestyle=(0, (2, 2)), label="target")
    axis.axvline(plan["capacity"], color=color(3), label=f"M* = {plan['capacity']}")
    axis.axvline(plan["slots"], color=color(5), linestyle="--", label=f"server holds {plan['slots']}")
    axis.set_ylim(0, 1.02)
    axis.set_xlim(left=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    label(axis, f"Global batch {plan['global_batch']:.0f}", "adapters resident at once", "admitted at once")
    return figure


def gpus_figure(plan: Mapping[str, Any]) -> Figure:
    """A bar for each constraint; the highest one binds."""
    figure, axes = new_figure(2.2)
    axis = axes[0, 0]
    names, gpus = zip(*plan["gpus_by_constraint"].items(), strict=True)
    fills = [color(1) if name == plan["binding_constraint"] else GRAY for name in names]
    axis.barh(range(len(names)), gpus, color=fills)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axis, f"Chosen: {plan['lora_server_gpus']} as {plan['layout']}", "GPUs, each constraint alone", "")
    return figure
