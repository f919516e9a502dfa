# SPDX-License-Identifier: Apache-2.0
"""The report's figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter
from numpy.typing import NDArray

from .run_file import ATTAINED_SHARE

# Okabe and Ito's colours, safe for colour-blind eyes.
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


def nothing(axis: Axes) -> None:
    axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", va="center", color=GRAY)


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Ticks at 1, 2, 5 (1 alone if high / low > 200) times powers of ten, in ms."""
    steps = (1,) if high / low > 200 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(-3, 8) for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}" if ms < 1e3 else f"{ms / 1e3:g} s"))


def run_legend(figure: Figure, runs: Sequence[dict[str, Any]]) -> None:
    """Colours of several runs."""
    if len(runs) > 1:
        handles = [
            Line2D([], [], color=color(i), linewidth=2, label=run["label"]) for i, run in enumerate(runs)
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=9.5)


FloatArray = NDArray[np.float64]
BASE_NAME = "(base)"


def present(values: list[float | None]) -> FloatArray:
    return np.asarray([value for value in values if value is not None], dtype=np.float64)


def finished(run: dict[str, Any]) -> list[int]:
    """Indices of finished requests."""
    return [index for index, e2el in enumerate(run["e2els"]) if e2el is not None]


def tpots_s(run: dict[str, Any]) -> FloatArray:
    """(E2E - TTFT) / (n - 1) of finished requests, n > 1."""
    return present([tpot_s(run, index) for index in finished(run)])


def tpot_s(run: dict[str, Any], index: int) -> float | None:
    num_tokens = run["output_lens"][index]
    return (run["e2els"][index] - run["ttfts"][index]) / (num_tokens - 1) if num_tokens > 1 else None


def cdf(values: FloatArray, max_points: int = 600) -> tuple[FloatArray, FloatArray]:
    """(sorted values, share at or below each), thinned to about max_points."""
    ordered = np.sort(values)
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) <= max_points:
        return ordered, shares
    keep = np.unique(np.linspace(0, len(ordered) - 1, max_points).astype(int))
    return ordered[keep], shares[keep]


def ends_s(run: dict[str, Any]) -> FloatArray:
    """Ends of finished requests, seconds after the run's start."""
    return present([run["start_times"][index] + run["e2els"][index] for index in finished(run)])


def rate_per_s(times_s: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Events per second in each bin."""
    counts, _ = np.histogram(times_s, edges_s)
    return counts / np.diff(edges_s)


def token_times_s(run: dict[str, Any]) -> FloatArray:
    """Arrival of each token chunk of finished requests."""
    parts = [
        run["start_times"][index] + run["ttfts"][index] + np.cumsum([0.0, *run["itls"][index]])
        for index in finished(run)
    ]
    return np.concatenate(parts) if parts else np.empty(0)


def in_flight(run: dict[str, Any], times_s: FloatArray) -> FloatArray:
    """Finished requests in flight at each time."""
    starts = np.sort([run["start_times"][index] for index in finished(run)])
    started = np.searchsorted(starts, times_s, "right")
    return (started - np.searchsorted(np.sort(ends_s(run)), times_s, "right")).astype(np.float64)


def attainment(run: dict[str, Any]) -> list[tuple[str, int, float]]:
    """(adapter, requests, share within the SLO), most popular first; failed requests miss."""
    ttft_s, tpot_limit_s = run["slo_ttft_s"], run["slo_tpot_s"]
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for index, adapter in enumerate(run["adapters"]):
        met = False
        if run["e2els"][index] is not None:
            tpot = tpot_s(run, index)
            met = run["ttfts"][index] <= ttft_s and (tpot is None or tpot <= tpot_limit_s)
        elif not run["errors"][index]:
            continue
        outcomes[adapter or BASE_NAME].append(met)
    found = [(adapter, len(mets), sum(mets) / len(mets)) for adapter, mets in outcomes.items()]
    return sorted(found, key=lambda row: (-row[1], row[0]))


MAX_BARS = 60
SLO_LINE: dict[str, Any] = {"color": GRAY, "linestyle": (0, (2, 2)), "linewidth": 1.3}

Run = dict[str, Any]


def _cdf(axis: Axes, runs: Sequence[Run], values_s: Callable[[Run], FloatArray], style: str = "-") -> bool:
    drawn = False
    for index, run in enumerate(runs):
        values = values_s(run)
        if len(values) == 0:
            continue
        ordered, shares = cdf(values * 1e3)
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
    low, high = min(low, slo_s * 400), max(high, slo_s * 2.5e3)
    axis.set_xlim(low, high)
    log_ticks(axis.xaxis, low, high)


def latency_cdfs(runs: Sequence[Run]) -> Figure:
    """CDFs of TTFT (dashed: decode TTFT) and TPOT."""
    figure, axes = new_figure(3.9, num_columns=2)
    ttft, tpot = axes[0]
    drawn = _cdf(ttft, runs, lambda run: present(run["ttfts"]))
    has_decode = _cdf(ttft, runs, lambda run: present(run["decode_ttfts_ms"]) / 1e3, "--")
    label(ttft, "TTFT", "ms (log)", "requests at or below")
    _finish_cdf(ttft, runs[0]["slo_ttft_s"], drawn)
    handles = [Line2D([], [], **SLO_LINE, label=f"SLO {runs[0]['slo_ttft_s']:g} s")]
    if has_decode:
        handles.insert(0, Line2D([], [], color=GRAY, label="as the client sees it"))
        handles.insert(1, Line2D([], [], color=GRAY, linestyle="--", label="decode TTFT"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    drawn = _cdf(tpot, runs, tpots_s)
    label(tpot, "TPOT", "ms (log)", "requests at or below")
    _finish_cdf(tpot, runs[0]["slo_tpot_s"], drawn)
    run_legend(figure, runs)
    return figure


def _edges(runs: Sequence[Run]) -> FloatArray:
    end_s = max(float(run["duration"]) for run in runs)
    bin_s = next((size for size in (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300) if end_s / size <= 120), 1800)
    return np.arange(0, end_s + bin_s, bin_s)


def load_over_time(runs: Sequence[Run]) -> Figure:
    """Arrivals and completions per second by run, then requests in flight and tokens/s."""
    figure, axes = new_figure(1.9 * len(runs) + 3.8, num_rows=len(runs) + 2, sharex=True)
    edges = _edges(runs)
    for index, run in enumerate(runs):
        axis = axes[index, 0]
        arrivals = rate_per_s(np.asarray(run["arrival_times"]), edges)
        axis.stairs(arrivals, edges, fill=True, color="#b9c2cc", label="arrivals")
        ends = rate_per_s(ends_s(run), edges)
        axis.stairs(ends, edges, color=color(index), linewidth=1.6, label="completions")
        name = f": {run['label']}" if len(runs) > 1 else ""
        label(axis, f"Arrivals and completions{name}", "", "requests / s")
        axis.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2)
        axis.set_ylim(top=1.3 * (max(arrivals.max(), ends.max()) or 1))
    flight, tokens = axes[-2, 0], axes[-1, 0]
    times = np.linspace(0, edges[-1], 800)
    for index, run in enumerate(runs):
        flight.plot(times, in_flight(run, times), color=color(index), linewidth=1.4)
        rates = rate_per_s(token_times_s(run), edges)
        tokens.stairs(rates, edges, color=color(index), linewidth=1.6)
    label(flight, "Requests in flight", "", "requests")
    label(tokens, "Output", "seconds after the start", "tokens / s")
    for axis in axes[:, 0]:
        axis.set_ylim(0, max(axis.get_ylim()[1], 1))
        axis.set_xlim(0, edges[-1])
    run_legend(figure, runs)
    return figure


def latency_over_time(runs: Sequence[Run]) -> Figure:
    """TTFT and TPOT by arrival, log scale; crosses are failed requests."""
    figure, axes = new_figure(4.6, num_rows=2, sharex=True)
    ttft, tpot = axes[:, 0]
    _latency_dots(ttft, runs, "TTFT", runs[0]["slo_ttft_s"], lambda run, index: run["ttfts"][index])
    _latency_dots(tpot, runs, "TPOT", runs[0]["slo_tpot_s"], tpot_s)
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
    low_ms, high_ms = slo_s * 400, slo_s * 2500
    for index, run in enumerate(runs):
        found = [(run["arrival_times"][place], value_s(run, place)) for place in finished(run)]
        dots = [(time, value * 1e3) for time, value in found if value]
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
    """Share of each adapter's requests within both SLOs; pale: up to 90 %."""
    figure, axes = new_figure(2.9 * len(runs), num_rows=len(runs))
    for index, run in enumerate(runs):
        axis = axes[index, 0]
        found = attainment(run)
        bars = found[:MAX_BARS]
        shares = [share for _, _, share in bars]
        strength = [1.0 if share > ATTAINED_SHARE else 0.4 for share in shares]
        fills = [to_rgba(color(index), alpha) for alpha in strength]
        axis.bar(range(len(bars)), shares, color=fills, width=0.78)
        none = [place for place, share in enumerate(shares) if share == 0]
        axis.scatter(none, [0.03] * len(none), marker="x", s=22, color=FAILED)
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
