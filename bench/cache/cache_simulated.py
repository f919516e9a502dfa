# SPDX-License-Identifier: Apache-2.0
"""The simulated cells of bench_cache: every policy at its best setting, on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from bench.harness.peak import highest_rate
from bench.sim.cached_runs import simulate_cached
from moe_lora.sim.instance import CachedConfig
from moe_lora.sim.requests import PARTS
from moe_lora.workload.replay_plan import TurnRequest

from .cache_plan import POLICIES, PolicyMaker, settings_of

REFERENCE = "fastlibra"
TARGET_TTFT_MS = 500.0
GRID = (0.5, 0.75, 1.0)
"""Rates for averages of TTFT and TPOT, as shares of the reference's peak."""
TRIED_AT = 0.9
"""Rate for the comparison of one policy's settings, as a share of the reference's peak."""
PEAK_PRECISION = 0.04
MAX_WAITING = 200
AVERAGED = (
    "ttft_ms",
    *(f"{part}_ms" for part in PARTS),
    "tpot_ms",
    "adapter_hit_rate",
    "kv_device_hit_rate",
    "kv_host_hit_rate",
    "invalid_kv_share",
    "device_usage",
    "device_adapter_usage",
    "host_usage",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model on its cards, a number of adapters, an application.  requests: by rate.  since_s: start of the
    judged requests.  first_rate: start of the search for peaks.
    """

    name: Mapping[str, Any]
    config: CachedConfig
    requests: Callable[[float], Sequence[TurnRequest]]
    since_s: Callable[[Sequence[TurnRequest]], float]
    first_rate: float


def run_cell(
    cell: Cell, policies: Sequence[str] = POLICIES
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(config, result) of each policy.

    The reference's peak sets the rates; of each policy the setting of least mean TTFT at `TRIED_AT` counts.
    Peaks: the highest rate with a mean TTFT below `TARGET_TTFT_MS`, to `PEAK_PRECISION`.
    """
    cell = replace(cell, requests=lru_cache(maxsize=6)(cell.requests))
    reference = next(iter(settings_of(REFERENCE).values()))
    top = peak_rate(cell, reference, cell.first_rate)
    rates = [share * top for share in GRID]
    for policy in policies:
        settings = settings_of(policy)
        tried = {name: simulated(cell, make, TRIED_AT * top)["ttft_ms"] for name, make in settings.items()}
        best = min(tried, key=lambda name: tried[name])
        points = [simulated(cell, settings[best], rate) for rate in rates]
        result: dict[str, Any] = {name: _mean(points, name) for name in AVERAGED}
        result |= {"peak_per_s": peak_rate(cell, settings[best], top), "points": points, "settings": tried}
        yield dict(cell.name) | {"policy": policy, "setting": best, "rates_per_s": rates}, result


def peak_rate(cell: Cell, make: PolicyMaker, guess: float) -> float:
    """By bisection, after a bracket was found by halving or doubling the guess."""

    def is_met(rate: float) -> bool:
        point = simulated(cell, make, rate, MAX_WAITING)
        return not point["aborted"] and point["ttft_ms"] < TARGET_TTFT_MS

    return highest_rate(is_met, guess, step=1.25, precision=PEAK_PRECISION)


def simulated(cell: Cell, make: PolicyMaker, rate: float, max_waiting: int = 10**9) -> dict[str, Any]:
    """Summary of one rate (`sim.instance`)."""
    requests = cell.requests(rate)
    policy = make(cell.config.costs())
    result = simulate_cached(cell.config, policy, requests, max_waiting=max_waiting)
    return {"rate_per_s": rate} | result.summary(cell.since_s(requests))


def _mean(points: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([point[name] or 0.0 for point in points]))
