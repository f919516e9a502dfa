"""The report's figures, each from the run files of one or more runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from . import series
from .plot_style import FAILED, GRAY, color, label, log_ticks, new_figure, nothing, run_legend
from .summary import ATTAINED_SHARE

MAX_BARS = 60
SLO_LINE: dict[str, Any] = {"color": GRAY, "linestyle": (0, (2, 2)), "linewidth": 1.3}

Run = dict[str, Any]


def _cdf(
    axis: Axes, runs: Sequence[Run], values_s: Callable[[Run], series.FloatArray], style: str = "-"
) -> bool:
    drawn = False
    for index, run in enumerate(runs):
        values = values_s(run)
        if len(values) == 0:
            continue
        ordered, shares = series.cdf(values * 1e3)
        drawn = True
        axis.step(ordered, shares, where="post", color=color(index), linewidth=1.9, linestyle=style)
    return drawn


def _finish_cdf(axis: Axes, slo_s: float, drawn: bool) -> None:
    axis.axvline(slo_s * 1e3, **SLO_LINE)
    axis.set_ylim(0, 1.01)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    for share in (0.5, 0.95):
        axis.axhline(share, color="#b8c0c8", linewidth=0.9)
    if not drawn:
        nothing(axis)
        return
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    low, high = min(low, slo_s * 400), max(high, slo_s * 2.5e3)  # never narrower than half a decade
    axis.set_xlim(low, high)
    log_ticks(axis.xaxis, low, high)


def latency_cdfs(runs: Sequence[Run]) -> Figure:
    """CDFs of TTFT (dashed: decode TTFT, where the server reports it) and of TPOT, with the SLOs."""
    figure, axes = new_figure(3.9, num_columns=2)
    ttft, tpot = axes[0]
    drawn = _cdf(ttft, runs, lambda run: series.present(run["ttfts"]))
    has_decode = _cdf(ttft, runs, lambda run: series.present(run["decode_ttfts_ms"]) / 1e3, "--")
    label(ttft, "TTFT", "ms (log)", "requests at or below")
    _finish_cdf(ttft, runs[0]["slo_ttft_s"], drawn)
    handles = [Line2D([], [], **SLO_LINE, label=f"SLO {runs[0]['slo_ttft_s']:g} s")]
    if has_decode:
        handles.insert(0, Line2D([], [], color=GRAY, label="as the client sees it"))
        handles.insert(1, Line2D([], [], color=GRAY, linestyle="--", label="decode TTFT"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    drawn = _cdf(tpot, runs, series.tpots_s)
    label(tpot, "TPOT", "ms (log)", "requests at or below")
    _finish_cdf(tpot, runs[0]["slo_tpot_s"], drawn)
    run_legend(figure, runs)
    return figure


def _edges(runs: Sequence[Run]) -> series.FloatArray:
    end_s = max(float(run["duration"]) for run in runs)
    bin_s = next((size for size in (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300) if end_s / size <= 120), 1800)
    return np.arange(0, end_s + bin_s, bin_s)


def load_over_time(runs: Sequence[Run]) -> Figure:
    """Arrivals and completions per second (a row a run), then requests in flight and output tokens/s."""
    figure, axes = new_figure(1.9 * len(runs) + 3.8, num_rows=len(runs) + 2, sharex=True)
    edges = _edges(runs)
    for index, run in enumerate(runs):
        axis = axes[index, 0]
        arrivals = series.rate_per_s(np.asarray(run["arrival_times"]), edges)
        axis.stairs(arrivals, edges, fill=True, color="#b9c2cc", label="arrivals")
        ends = series.rate_per_s(series.ends_s(run), edges)
        axis.stairs(ends, edges, color=color(index), linewidth=1.6, label="completions")
        name = f": {run['label']}" if len(runs) > 1 else ""
        label(axis, f"Arrivals and completions{name}", "", "requests / s")
        axis.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2)
        axis.set_ylim(top=1.3 * (max(arrivals.max(), ends.max()) or 1))  # room for the legend
    flight, tokens = axes[-2, 0], axes[-1, 0]
    times = np.linspace(0, edges[-1], 800)
    for index, run in enumerate(runs):
        flight.plot(times, series.in_flight(run, times), color=color(index), linewidth=1.4)
        rates = series.rate_per_s(series.token_times_s(run), edges)
        tokens.stairs(rates, edges, color=color(index), linewidth=1.6)
    label(flight, "Requests in flight", "", "requests")
    label(tokens, "Output", "seconds after the start", "tokens / s")
    for axis in axes[:, 0]:
        axis.set_ylim(0, max(axis.get_ylim()[1], 1))
        axis.set_xlim(0, edges[-1])
    run_legend(figure, runs)
    return figure


def latency_over_time(runs: Sequence[Run]) -> Figure:
    """TTFT and TPOT of each request at its arrival, log scale; crosses at the foot are failed requests."""
    figure, axes = new_figure(4.6, num_rows=2, sharex=True)
    ttft, tpot = axes[:, 0]
    _latency_dots(ttft, runs, "TTFT", runs[0]["slo_ttft_s"], lambda run, index: run["ttfts"][index])
    _latency_dots(tpot, runs, "TPOT", runs[0]["slo_tpot_s"], series.tpot_s)
    for run in runs:
        failed = [time for time, error in zip(run["arrival_times"], run["errors"], strict=True) if error]
        foot = [0.03] * len(failed)
        ttft.scatter(failed, foot, marker="x", s=26, color=FAILED, transform=ttft.get_xaxis_transform())
    tpot.set_xlabel("seconds after the start", fontsize=9.5)
    run_legend(figure, runs)
    return figure


def _latency_dots(
    axis: Axes, runs: Sequence[Run], name: str, slo_s: float, value_s: Callable[[Run, int], float | None]
) -> None:
    low_ms, high_ms = slo_s * 400, slo_s * 2500  # the SLO stays in sight
    for index, run in enumerate(runs):
        found = [(run["arrival_times"][place], value_s(run, place)) for place in series.finished(run)]
        dots = [
            (time, value * 1e3) for time, value in found if value
        ]  # no TPOT, or 0: no place on a log scale
        times, values = np.reshape(dots, (-1, 2)).T
        axis.scatter(times, values, s=11, alpha=0.55, color=color(index), linewidths=0)
        low_ms = min([low_ms, *(value * 0.8 for _, value in dots)])
        high_ms = max([high_ms, *(value * 1.25 for _, value in dots)])
    axis.axhline(slo_s * 1e3, **SLO_LINE)
    axis.set_ylim(low_ms, high_ms)
    axis.set_yscale("log")
    log_ticks(axis.yaxis, low_ms, high_ms)
    label(axis, f"{name} by arrival time (dotted: SLO)", "", "ms (log)")


def attainment_bars(runs: Sequence[Run]) -> Figure:
    """Share of each adapter's requests within both SLOs, most asked for first; pale: not above 90 %."""
    figure, axes = new_figure(2.9 * len(runs), num_rows=len(runs))
    for index, run in enumerate(runs):
        axis = axes[index, 0]
        found = series.attainment(run)
        bars = found[:MAX_BARS]
        shares = [share for _, _, share in bars]
        strength = [1.0 if share > ATTAINED_SHARE else 0.4 for share in shares]
        fills = [to_rgba(color(index), alpha) for alpha in strength]
        axis.bar(range(len(bars)), shares, color=fills, width=0.78)
        none = [place for place, share in enumerate(shares) if share == 0]
        axis.scatter(
            none, [0.03] * len(none), marker="x", s=22, color=FAILED
        )  # a bar of height 0 shows nothing
        axis.axhline(ATTAINED_SHARE, **SLO_LINE)
        axis.set_ylim(0, 1.02)
        axis.set_xlim(-0.6, max(len(bars), 8) - 0.4)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_xticks(range(len(bars)), [f"{name} ({count})" for name, count, _ in bars], rotation=60)
        for text in axis.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor", fontsize=8 if len(bars) <= 40 else 6.5)
        axis.grid(False, axis="x")
        left_out = f", the {MAX_BARS} most asked for of {len(found)}" if len(found) > MAX_BARS else ""
        name = f": {run['label']}" if len(runs) > 1 else ""
        label(
            axis,
            f"Requests within SLO by adapter{name}",
            f"adapter (requests{left_out}); pale: 90 % or less; cross: none",
            "within SLO",
        )
    return figure
