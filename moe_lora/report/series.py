"""From the arrays of a run file to the numbers that a plot shows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BASE_NAME = "(base)"


def present(values: list[float | None]) -> FloatArray:
    return np.asarray([value for value in values if value is not None], dtype=np.float64)


def finished(run: dict[str, Any]) -> list[int]:
    """Indices of the requests that have an end."""
    return [index for index, e2el in enumerate(run["e2els"]) if e2el is not None]


def tpots_s(run: dict[str, Any]) -> FloatArray:
    """(E2E - TTFT) / (n - 1) of each finished request with more than one token."""
    return present([tpot_s(run, index) for index in finished(run)])


def tpot_s(run: dict[str, Any], index: int) -> float | None:
    num_tokens = run["output_lens"][index]
    return (run["e2els"][index] - run["ttfts"][index]) / (num_tokens - 1) if num_tokens > 1 else None


def cdf(values: FloatArray, max_points: int = 600) -> tuple[FloatArray, FloatArray]:
    """(sorted values, share of values at or below each), thinned to about max_points."""
    ordered = np.sort(values)
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) <= max_points:
        return ordered, shares
    keep = np.unique(np.linspace(0, len(ordered) - 1, max_points).astype(int))
    return ordered[keep], shares[keep]


def ends_s(run: dict[str, Any]) -> FloatArray:
    """When each finished request ended, in seconds after the run's start."""
    return present([run["start_times"][index] + run["e2els"][index] for index in finished(run)])


def rate_per_s(times_s: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Events per second in each bin."""
    counts, _ = np.histogram(times_s, edges_s)
    return counts / np.diff(edges_s)


def token_times_s(run: dict[str, Any]) -> FloatArray:
    """When each token chunk of the finished requests arrived."""
    parts = [
        run["start_times"][index] + run["ttfts"][index] + np.cumsum([0.0, *run["itls"][index]])
        for index in finished(run)
    ]
    return np.concatenate(parts) if parts else np.empty(0)


def in_flight(run: dict[str, Any], times_s: FloatArray) -> FloatArray:
    """Finished requests under way at each time."""
    starts = np.sort([run["start_times"][index] for index in finished(run)])
    started = np.searchsorted(starts, times_s, "right")
    ended = np.searchsorted(np.sort(ends_s(run)), times_s, "right")
    return (started - ended).astype(np.float64)


def attainment(run: dict[str, Any]) -> list[tuple[str, int, float]]:
    """(adapter, requests, share within the SLO), most asked for first; failed requests miss it."""
    ttft_s, tpot_limit_s = run["slo_ttft_s"], run["slo_tpot_s"]
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for index, adapter in enumerate(run["adapters"]):
        met = False
        if run["e2els"][index] is not None:
            tpot = tpot_s(run, index)
            met = run["ttfts"][index] <= ttft_s and (tpot is None or tpot <= tpot_limit_s)
        elif not run["errors"][index]:
            continue  # interrupted by the user
        outcomes[adapter or BASE_NAME].append(met)
    found = [(adapter, len(mets), sum(mets) / len(mets)) for adapter, mets in outcomes.items()]
    return sorted(found, key=lambda row: (-row[1], row[0]))
