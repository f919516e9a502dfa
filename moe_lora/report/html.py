"""One HTML file, with all plots inside it, that shows one run or several side by side."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from . import plots
from .page import PAGE
from .results import write_text
from .tables import rows, shown

_CARDS = (
    ("Output tokens / s", "output_throughput", "{:.0f}"),
    ("TTFT P95", "p95_ttft_ms", "{:.0f} ms"),
    ("TPOT mean", "mean_tpot_ms", "{:.1f} ms"),
    ("Adapters within SLO", "slo_attainment_adapters", "{:.0%}"),
    ("Exact answers", "exact_answers", "{:.1%}"),
)


def write_report(path: str | Path, runs: Sequence[dict[str, Any]], title: str = "Load test") -> None:
    """Write the report of one or more run files' contents (`run_file.read_run`); opens without a network.

    With several runs each gets a colour and a column. Raises ValueError without any.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    write_text(path, render(runs, title))


def render(runs: Sequence[dict[str, Any]], title: str = "Load test") -> str:
    """The page's HTML."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    figures = (
        ("How long requests waited", plots.latency_cdfs),
        ("Load over time", plots.load_over_time),
        ("Adapters", plots.attainment_bars),
        ("Latency over time", plots.latency_over_time),
    )
    return environment.from_string(PAGE).render(
        title=title,
        runs=runs,
        colors=[plots.color(index) for index in range(len(runs))],
        cards=[[(name, shown(run, key, form)) for name, key, form in _CARDS if key in run] for run in runs],
        rows=rows(runs),
        figures=[(heading, png(draw(runs))) for heading, draw in figures],
        details=[_details(run) for run in runs],
    )


def png(figure: Figure) -> str:
    """The figure as base64 text, for a data URL."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def _details(run: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(run.get(name, {}), indent=1, ensure_ascii=False) for name in ("config", "env")}
