# SPDX-License-Identifier: Apache-2.0
"""Reports as single HTML files with embedded plots."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, PercentFormatter

from . import plots
from .plots import GRAY, color, label, new_figure
from .results import write_text
from .run_file import rows, shown

BASE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #1c2530; background: #f4f6f8; margin: 0; }
 main { max-width: 980px; margin: 0 auto; padding: 24px 20px 60px; }
 h1 { font-size: 26px; margin: 0 0 4px; }
 h2 { font-size: 18px; margin: 34px 0 10px; }
 .sub { color: #5f6770; margin: 0 0 18px; }
 dt { font-weight: 600; }
 dd { margin: 0 0 6px; }
 .cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 8px 0 14px; }
 .card { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; }
 .card { padding: 10px 16px; min-width: 120px; }
 .card b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
 .card span { color: #5f6770; font-size: 13px; }
 .run { border-left: 5px solid; padding-left: 12px; margin: 14px 0; }
 .panel { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; padding: 14px; overflow-x: auto; }
 .panel img { width: 100%; display: block; }
 table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
 th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid #edf0f3; white-space: pre; }
 th:first-child, td:first-child { text-align: left; }
 .errors { color: #b00020; }
 pre { overflow-x: auto; font-size: 12.5px; background: #fff; border: 1px solid #dfe3e8; padding: 12px; }
 summary { cursor: pointer; margin-top: 10px; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% block content %}{% endblock %}
</main>
</body>
</html>
"""

RUNS = """{% extends "base" %}
{% block content %}
{% for note in notes %}
<p>{{ note }}</p>
{% endfor %}
<dl>
{% for run in runs %}
<dt style="color: {{ colors[loop.index0] }}">{{ run.label }}</dt><dd>{{ abouts[loop.index0] }}</dd>
{% endfor %}
</dl>
<p class="sub">{{ terms }}</p>
{% for run in runs %}
<section class="run" style="border-color: {{ colors[loop.index0] }}">
<strong>{{ run.label }}</strong>
<span class="sub">{{ run.kind }}, {{ run.date }}, {{ run.completed }} requests,
{{ run.num_adapters }} adapters, {{ "%.0f"|format(run.duration) }} s
{%- if run.stopped_early %}, stopped by the user{% endif %}</span>
<div class="cards">
{% for name, value in cards[loop.index0] if value != "–" %}
<div class="card"><b>{{ value }}</b><span>{{ name }}</span></div>
{% endfor %}
</div>
{% if run.error_counts %}
<ul class="errors">
{% for message, count in run.error_counts.items() %}
<li>{{ count }} failed: {{ message }}</li>
{% endfor %}
</ul>
{% endif %}
</section>
{% endfor %}
{% for heading, image in figures %}
<h2>{{ heading }}</h2>
<div class="panel"><img alt="{{ heading }}" src="data:image/png;base64,{{ image }}"></div>
{% endfor %}
<h2>All numbers</h2>
<div class="panel">
<table>
<tr><th></th>{% for run in runs %}<th>{{ run.label }}</th>{% endfor %}</tr>
{% for heading, texts in rows %}
<tr><td>{{ heading }}</td>{% for text in texts %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</table>
</div>
<h2>How it was measured</h2>
{% for run in runs %}
<details><summary>{{ run.label }}: configuration and environment</summary>
<pre>{{ details[loop.index0].config }}</pre>
<pre>{{ details[loop.index0].env }}</pre>
</details>
{% endfor %}
{% endblock %}
"""

PLAN = """{% extends "base" %}
{% block content %}
<pre style="white-space: pre-wrap">{{ text }}</pre>
{% for heading, image in figures %}
<h2>{{ heading }}</h2>
<div class="panel"><img alt="{{ heading }}" src="data:image/png;base64,{{ image }}"></div>
{% endfor %}
<h2>Words</h2>
<p>{{ words }}</p>
<h2>The plan as JSON</h2>
<pre style="white-space: pre-wrap">{{ content }}</pre>
{% endblock %}
"""

_TEMPLATES = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    loader=jinja2.DictLoader({"base": BASE, "runs": RUNS, "plan": PLAN}),
)

_CARDS = (
    ("Output tokens / s", "output_throughput", "{:.0f}"),
    ("TTFT P95", "p95_ttft_ms", "{:.0f} ms"),
    ("TPOT mean", "mean_tpot_ms", "{:.1f} ms"),
    ("Adapters within SLO", "slo_attainment_adapters", "{:.0%}"),
    ("Exact answers", "exact_answers", "{:.1%}"),
)


TERMS = (
    "TTFT: from sending a request to its first token; decode TTFT: the same without prefill, as the server "
    "reports it. TPOT: mean time between a request's further tokens. SLO: the most that both may be. "
    "Goodput: requests within the SLO per second. An adapter is within the SLO if more than 90 % of its "
    "requests are. P95: 95 % of requests are no slower. Emulated: real engines, slowed to the times of "
    "another device."
)


def write_report(
    path: str | Path, runs: Sequence[dict[str, Any]], title: str = "Load test", notes: Sequence[str] = ()
) -> None:
    """Write the runs' report (`run_file.read_run`).  Raises ValueError without runs."""
    if not runs:
        raise ValueError("a report needs at least one run")
    write_text(path, render(runs, title, notes))


def render(runs: Sequence[dict[str, Any]], title: str = "Load test", notes: Sequence[str] = ()) -> str:
    """The page's HTML."""
    figures = (
        ("How long requests waited", plots.latency_cdfs),
        ("Load over time", plots.load_over_time),
        ("Adapters", plots.attainment_bars),
        ("Latency over time", plots.latency_over_time),
    )
    return _TEMPLATES.get_template("runs").render(
        title=title,
        notes=notes,
        runs=runs,
        abouts=[about(run) for run in runs],
        terms=TERMS,
        colors=[plots.color(index) for index in range(len(runs))],
        cards=[[(name, shown(run, key, form)) for name, key, form in _CARDS if key in run] for run in runs],
        rows=rows(runs),
        figures=[(heading, png(draw(runs))) for heading, draw in figures],
        details=[_details(run) for run in runs],
    )


def about(run: dict[str, Any]) -> str:
    """Server, load and machine of the run."""
    config, env = run.get("config", {}), run.get("env", {})
    machine = [
        env.get("cpu_model") and f"{env['cpu_model']}, {env.get('cpu_cores')} cores",
        *env.get("gpus", ()),
        env.get("git_commit")
        and f"commit {env['git_commit'][:10]}{' with changes' if env.get('git_dirty') else ''}",
    ]
    rate = config.get("request_rate")
    load = [
        config.get("trace") and f"trace {Path(config['trace']).name}",
        rate and f"{rate:g} requests/s",
    ]
    slo = f"TTFT {run['slo_ttft_s']:g} s, TPOT {run['slo_tpot_s']:g} s"
    parts = {
        "Model": config.get("model"),
        "Emulated": config.get("emulates"),
        "Load": ", ".join(filter(None, load)),
        "SLO": slo,
        "Load client's machine": ", ".join(filter(None, machine)),
    }
    return ". ".join(f"{name}: {text}" for name, text in parts.items() if text)


def png(figure: Figure) -> str:
    """The figure as base64 text; names of runs and adapters with dollar signs are no formulas."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def _details(run: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(run.get(name, {}), indent=1, ensure_ascii=False) for name in ("config", "env")}


Curves = Mapping[str, Sequence[tuple[int, float]]]

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
    """Write the plan's page.  plan: `Plan.to_json()`.  curves: (capacity, IAR) by estimator."""
    figures = (
        ("Requests that start at once, by capacity", iar_figure(plan, curves)),
        _bars(plan),
    )
    page = _TEMPLATES.get_template("plan").render(
        title=f"Plan: {plan['inputs']['model']}",
        text="\n".join(lines),
        words=_WORDS,
        figures=[(heading, png(figure)) for heading, figure in figures],
        content=json.dumps(plan, indent=1),
    )
    write_text(path, page)


def iar_figure(plan: Mapping[str, Any], curves: Curves) -> Figure:
    """IAR over capacity by estimator, with target, M* and slots."""
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


def _bars(plan: Mapping[str, Any]) -> tuple[str, Figure]:
    if plan["kind"] == "coupled":
        bound = {} if plan["lower_bound"] is None else {"lower bound": plan["lower_bound"]["gpus"]}
        bars = bound | {"this plan": plan["total_gpus"]}
        chosen = f"Chosen: {plan['instances']} coupled instances"
        return "GPUs in all", gpus_figure(bars, "this plan", chosen, "GPUs")
    bars, chosen = plan["gpus_by_constraint"], f"Chosen: {plan['lora_server_gpus']} as {plan['layout']}"
    figure = gpus_figure(bars, plan["binding_constraint"], chosen, "GPUs, each constraint alone")
    return "LoRA Server GPUs that each constraint needs", figure


def gpus_figure(bars: Mapping[str, int], marked: str, title: str, unit: str) -> Figure:
    """A bar for each name."""
    figure, axes = new_figure(2.2)
    axis = axes[0, 0]
    names, gpus = tuple(bars), tuple(bars.values())
    fills = [color(1) if name == marked else GRAY for name in names]
    axis.barh(range(len(names)), gpus, color=fills)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axis, title, unit, "")
    return figure
