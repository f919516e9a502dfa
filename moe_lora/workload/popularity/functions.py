# SPDX-License-Identifier: Apache-2.0
"""Azure Functions traces with functions as adapters.

Identities, most frequent first, go to the adapters round robin in blocks of `skewness`.
Source: dLoRA section 7.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_lora.workload.replay_plan import FloatArray, positive
from moe_lora.workload.traces.formats import function_counts, is_2019, rows_2019, rows_2021
from moe_lora.workload.traces.records import Trace, need

from .popularity import Popularity, from_weights


def map_identities(counts: Mapping[str, int], adapters: Sequence[str], skewness: int = 1) -> dict[str, int]:
    """Index of each identity's adapter: (place by falling count // skewness) mod number of adapters.

    A larger skewness is more uneven.
    """
    need(skewness >= 1, "skewness", skewness, "a whole number >= 1")
    if not adapters:
        raise ValueError("no adapter to map to; name at least one")
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    return {name: place // skewness % len(adapters) for place, name in enumerate(ranked)}


def mapped_popularity(counts: Mapping[str, int], adapters: Sequence[str], skewness: int = 1) -> Popularity:
    """Each adapter's share of its identities' counts."""
    weights = [0] * len(adapters)
    for name, index in map_identities(counts, adapters, skewness).items():
        weights[index] += counts[name]
    return from_weights(adapters, weights)


def map_adapters(trace: Trace, adapters: Sequence[str], skewness: int = 1) -> Trace:
    """The trace with adapter names mapped to `adapters`.

    Raises ValueError if the trace names no adapter.
    """
    counts = Counter(request.adapter for request in trace.requests if request.adapter is not None)
    if not counts:
        raise ValueError(f"{trace.path}: the trace names no adapter to map; choose a popularity instead")
    mapping = map_identities(counts, adapters, skewness)
    requests = tuple(
        request if request.adapter is None else replace(request, adapter=adapters[mapping[request.adapter]])
        for request in trace.requests
    )
    return replace(trace, requests=requests)


MINUTE_S = 60.0
MAX_INVOCATIONS = 5_000_000


@dataclass(frozen=True, slots=True)
class Invocations:
    """arrivals_s[i] (sorted, from 0 on) asks for adapters[adapter_index[i]]."""

    adapters: tuple[str, ...]
    arrivals_s: FloatArray
    adapter_index: NDArray[np.int64]


def functions_popularity(path: str | Path, adapters: Sequence[str], skewness: int = 1) -> Popularity:
    """Each adapter's share of the invocations."""
    return mapped_popularity(function_counts(path), adapters, skewness)


def read_invocations(
    path: str | Path,
    adapters: Sequence[str],
    skewness: int = 1,
    *,
    request_rate_per_s: float | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Invocations:
    """The invocations as arrivals of adapters.  Deterministic.

    2019 counts by minute: uniform within the minute.  2021: end_timestamp - duration.

    request_rate_per_s: thins at random to this mean rate; None: all.  duration_s: only the file's first
    seconds.  Raises ValueError as `function_counts`, for a rate above the file's own, and above
    MAX_INVOCATIONS.
    """
    for name, value in (("request_rate", request_rate_per_s), ("duration_s", duration_s)):
        if value is not None:
            positive(name, value)
    counts = function_counts(path)
    mapping = map_identities(counts, adapters, skewness)
    rng = np.random.default_rng(seed)
    wanted = request_rate_per_s, duration_s or math.inf
    take = _take_2019 if is_2019(path) else _take_2021
    times, index = take(path, mapping, sum(counts.values()), wanted, rng)
    order = np.argsort(times, kind="stable")
    if not len(order):
        raise ValueError(f"{path}: no invocation is left; choose a higher rate or a longer duration")
    times = times[order]
    return Invocations(tuple(adapters), times - times[0], index[order])


def with_invocations(lengths: Trace, invocations: Invocations) -> Trace:
    """The invocations with the lengths and texts of `lengths`, repeated."""
    rows, names = lengths.requests, invocations.adapters
    requests = tuple(
        replace(rows[i % len(rows)], arrival_s=float(arrival_s), adapter=names[index])
        for i, (arrival_s, index) in enumerate(
            zip(invocations.arrivals_s, invocations.adapter_index, strict=True)
        )
    )
    return replace(lengths, requests=requests, has_arrival_times=True)


_Taken = tuple[FloatArray, NDArray[np.int64]]
_Wanted = tuple[float | None, float]


def _kept_share(path: str | Path, wanted_per_s: float | None, total: int, span_s: float) -> float:
    if wanted_per_s is None:
        return 1.0
    if wanted_per_s * span_s > total:
        has = f"{total} invocations in {span_s:.6g} s"
        raise ValueError(
            f"{path}: {has} are fewer than request_rate={wanted_per_s} a second; choose a lower one"
        )
    return wanted_per_s * span_s / total


def _check_fits(path: str | Path, num_invocations: int) -> None:
    if num_invocations > MAX_INVOCATIONS:
        raise ValueError(
            f"{path}: {num_invocations} invocations, more than the {MAX_INVOCATIONS} held in memory; "
            "choose a lower request rate or a shorter duration"
        )


def _take_2019(
    path: str | Path, mapping: Mapping[str, int], total: int, wanted: _Wanted, rng: np.random.Generator
) -> _Taken:
    rate_per_s, duration_s = wanted
    by_adapter: dict[int, NDArray[np.int64]] = {}
    for function, minutes in rows_2019(path):
        if function in mapping:
            index = mapping[function]
            by_adapter[index] = minutes + by_adapter.get(index, 0)
    counts = np.stack([by_adapter[index] for index in sorted(by_adapter)])
    num_minutes = counts.shape[1]
    kept = rng.binomial(counts, _kept_share(path, rate_per_s, total, num_minutes * MINUTE_S))
    kept[:, math.ceil(min(duration_s / MINUTE_S, num_minutes)) :] = 0
    _check_fits(path, int(kept.sum()))
    cells = np.repeat(np.arange(kept.size), kept.ravel())
    times = (cells % num_minutes + rng.random(len(cells))) * MINUTE_S
    index = np.asarray(sorted(by_adapter), dtype=np.int64)[cells // num_minutes]
    return times[times < duration_s], index[times < duration_s]


def _take_2021(
    path: str | Path, mapping: Mapping[str, int], total: int, wanted: _Wanted, rng: np.random.Generator
) -> _Taken:
    rate_per_s, duration_s = wanted
    times = np.empty(total, dtype=np.float64)
    index = np.empty(total, dtype=np.int64)
    for i, (function, start_s) in enumerate(rows_2021(path)):
        times[i], index[i] = start_s, mapping[function]
    times -= times.min()
    kept = (times < duration_s) & (
        rng.random(total) < _kept_share(path, rate_per_s, total, float(times.max()))
    )
    _check_fits(path, int(kept.sum()))
    return times[kept], index[kept]
