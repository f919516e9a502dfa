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
    """Write the report of one or more run files' contents (`run_file.read_run`); opens without a network.

    With several runs each gets a colour and a column.  notes: paragraphs to begin with.  Raises ValueError
    without any run.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    write_text(path, render(runs, title, notes))


def render(runs: Sequence[dict[str, Any]], title: str = "Load test", notes: Sequence[str] = ()) -> str:
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
    """What was served, how it was loaded, and on which machine, as far as the run file says so."""
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
    """The figure as base64 text, for a data URL."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def _details(run: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(run.get(name, {}), indent=1, ensure_ascii=False) for name in ("config", "env")}
