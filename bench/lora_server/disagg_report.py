# SPDX-License-Identifier: Apache-2.0
"""Results of `bench_disagg`: serviceable rates and their ratios, beside expectations and the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_lora.provision.placement.placement import balanced_assignment
from moe_lora.report.latency import SloTargets
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.traces.records import Trace

from .disagg_device import Device
from .disagg_expect import serviceable_rate
from .disagg_plan import Plan, System

Record = dict[str, Any]
Row = dict[str, Any]
PAPER_RATE_RATIO = {"coupled 50/50": 3.05, "coupled 40/60": 4.56}
PAPER_ATTAINMENT_POINTS = {"coupled 50/50": 54.0, "coupled 50/50 SJF": 53.1, "coupled 40/60": 60.6}
PAPER_THROUGHPUT_RATIO = {"coupled 50/50": 1.073}
_SLO = SloTargets()
_HOPELESS = 6.0


def is_hopeless(result: dict[str, Any]) -> bool:
    """So far beyond the SLO that higher rates add nothing."""
    return badness(result) > _HOPELESS


def badness(result: dict[str, Any]) -> float:
    """The worse of P95 decode TTFT and mean TPOT by their targets: serviceable up to 1."""
    ttft_ms, tpot_ms = result["p95_decode_ttft_ms"], result["mean_tpot_ms"]
    if ttft_ms is None or result["failed"]:
        return math.inf
    return max(ttft_ms / (1e3 * _SLO.ttft_s), (tpot_ms or 0.0) / (1e3 * _SLO.tpot_s))


def serviceable(points: Sequence[tuple[float, float]]) -> tuple[float, str]:
    """(rate, "=", "<" or ">") from points (rate, badness) of one system, by rising rate.

    Log badness is interpolated linearly in the rate after the last serviceable prefix.  ">": all are
    serviceable; "<": none is.
    """
    last: tuple[float, float] | None = None
    for rate, bad in sorted(points):
        if bad > 1:
            if last is None:
                return rate, "<"
            if not math.isfinite(bad):
                return last[0], "="
            low, high = math.log(max(last[1], 1e-9)), math.log(bad)
            return last[0] + (rate - last[0]) * -low / (high - low), "="
        last = (rate, bad)
    return (last[0] if last else 0.0), ">"


def _curve(records: Sequence[Record], name: str, arrivals: str) -> dict[float, dict[str, Any]]:
    return {
        r["config"]["rate_per_s"]: r["result"]
        for r in records
        if r["config"]["part"] == "rates"
        and r["config"]["system"]["name"] == name
        and r["config"]["arrivals"] == arrivals
    }


def comparison(records: Sequence[Record]) -> list[Row]:
    """Per arrivals and coupled system: the disaggregated system's ratio, and the paper's.

    points, throughput: attainment in points and tokens/s as a ratio, means over common rates.
    """
    rows: list[Row] = []
    for arrivals in ("poisson", "trace"):
        ours = _curve(records, "disaggregated", arrivals)
        if not ours:
            continue
        rate, sign = serviceable([(r, badness(result)) for r, result in ours.items()])
        rows.append({"arrivals": arrivals, "system": "disaggregated", "rate": f"{sign} {rate:.0f}"})
        names = dict.fromkeys(
            r["config"]["system"]["name"] for r in records if r["config"]["part"] == "rates"
        )
        for name in names:
            theirs = _curve(records, name, arrivals)
            if name != "disaggregated" and theirs:
                rows.append({"arrivals": arrivals, "system": name} | _against(ours, theirs, rate, sign, name))
    return rows


def _against(
    ours: dict[float, Any], theirs: dict[float, Any], our_rate: float, our_sign: str, name: str
) -> Row:
    rate, sign = serviceable([(r, badness(result)) for r, result in theirs.items()])
    exact = {("=", "="): "", (">", "="): "> ", (">", "<"): "> ", ("=", "<"): "> "}.get((our_sign, sign), "? ")
    row: Row = {
        "rate": f"{sign} {rate:.0f}",
        "ratio": f"{exact}{our_rate / rate:.2f}",
        "paper": PAPER_RATE_RATIO.get(name, ""),
    }
    key = "slo_attainment_adapters_decode_ttft"
    # Interpolated on our curve: the two sides' grids differ.
    rates = sorted(ours)
    shared = [r for r in sorted(theirs) if rates[0] <= r <= rates[-1]]
    if shared:
        attained = [
            np.interp(r, rates, [ours[x][key] or 0.0 for x in rates]) - (theirs[r][key] or 0.0)
            for r in shared
        ]
        through = [
            np.interp(r, rates, [ours[x]["window_output_throughput"] for x in rates])
            / theirs[r]["window_output_throughput"]
            for r in shared
        ]
        row |= {
            "points": f"{100 * np.mean(attained):+.1f}",
            "paper points": PAPER_ATTAINMENT_POINTS.get(name, ""),
            "throughput": f"{np.mean(through):.3f}",
            "paper throughput": PAPER_THROUGHPUT_RATIO.get(name, ""),
        }
    return row


def expectations(device: Device, plan: Plan, trace: Trace) -> list[Row]:
    """Serviceable rates by `disagg_expect`, for the measured systems."""
    answer_tokens = float(np.mean([request.output_tokens for request in trace.requests]))
    systems = {s.system.name: s.system for s in plan.series if s.part == "rates"}
    return [_expectation(device, system, plan.num_adapters, answer_tokens) for system in systems.values()]


def _expectation(device: Device, system: System, num_adapters: int, answer_tokens: float) -> Row:
    remote = system.server_gpus > 0

    def step_s(num_rows: float) -> float:
        return device.step_s(num_rows, remote=remote, kernel_ratio=system.kernel_ratio)

    found = serviceable_rate(
        _caches(system, num_adapters),
        system.slots,
        system.num_instances,
        system.kv_requests,
        answer_tokens,
        step_s,
    )
    return {
        "system": system.name,
        "slots": f"{system.slots}" if remote else f"{system.num_instances} x {system.slots}",
        "rate": f"{found.rate_per_s:.0f}",
        "rows": f"{found.rows_per_instance:.0f}",
        "TPOT ms": f"{1e3 * found.tpot_s:.1f}",
        "bound by": found.binds,
    }


def _caches(system: System, num_adapters: int) -> list[np.ndarray]:
    popularity = zipf([str(i) for i in range(num_adapters)], 1.2)
    shares = dict(zip(popularity.adapters, popularity.probabilities, strict=True))
    if system.server_gpus:
        return [np.array(list(shares.values()))]
    owner = balanced_assignment(shares, system.num_instances)
    return [np.array([p for a, p in shares.items() if owner[a] == i]) for i in range(system.num_instances)]
