# SPDX-License-Identifier: Apache-2.0
"""Arrival times: recorded, scaled, or drawn from a Poisson or Gamma process.  Seconds, sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_lora.workload.traces.records import need

FloatArray = NDArray[np.float64]


def positive(name: str, value: float) -> float:
    """The value.  Raises ValueError unless finite and > 0."""
    need(0 < value < math.inf, name, value, "a finite number > 0")
    return float(value)


def original_arrivals(arrivals_s: Sequence[float], request_rate_per_s: float | None = None) -> FloatArray:
    """Recorded times from 0 on; with a rate, stretched to (n - 1) / last time = rate.

    Raises ValueError for a rate with all requests at one moment.
    """
    times = np.asarray(arrivals_s, dtype=np.float64)
    times = times - times[0]
    if request_rate_per_s is None:
        return times
    rate = positive("request_rate", request_rate_per_s)
    if times[-1] == 0.0:
        raise ValueError(
            "the trace's requests all arrive at once, so its times can't be scaled to --request-rate"
        )
    return times * ((len(times) - 1) / rate / times[-1])


def gamma_arrivals(
    num_requests: int, request_rate_per_s: float, burstiness: float, rng: np.random.Generator
) -> FloatArray:
    """Cumulated Gamma(shape=burstiness, mean=1/rate) gaps; 1.0 is Poisson, less is burstier.

    `burstiness` as in vLLM's benchmark client; the gaps' variation is 1 / sqrt(burstiness).
    """
    rate = positive("request_rate", request_rate_per_s)
    shape = positive("burstiness", burstiness)
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), size=num_requests))


def gamma_arrivals_until(
    duration_s: float, request_rate_per_s: float, burstiness: float, rng: np.random.Generator
) -> FloatArray:
    """As `gamma_arrivals`, before duration_s; possibly empty."""
    block = math.ceil(positive("duration_s", duration_s) * positive("request_rate", request_rate_per_s)) + 16
    times = gamma_arrivals(block, request_rate_per_s, burstiness, rng)
    while times[-1] < duration_s:
        times = np.concatenate(
            [times, times[-1] + gamma_arrivals(block, request_rate_per_s, burstiness, rng)]
        )
    return cut_duration(times, duration_s)


def cut_duration(arrivals_s: FloatArray, duration_s: float) -> FloatArray:
    """Arrivals before duration_s."""
    return arrivals_s[arrivals_s < positive("duration_s", duration_s)]


def busiest_stretch(arrivals_s: Sequence[float], duration_s: float) -> slice:
    """Indices of the most arrivals within duration_s; ties: the first."""
    times = np.asarray(arrivals_s, dtype=np.float64)
    ends = np.searchsorted(times, times + positive("duration_s", duration_s), side="left")
    first = int(np.argmax(ends - np.arange(len(times))))
    return slice(first, int(ends[first]))
