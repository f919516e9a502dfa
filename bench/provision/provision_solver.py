# SPDX-License-Identifier: Apache-2.0
"""The solver part of `bench_provision`: time, memory and error of `min_capacity` up to 10^6 adapters."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness.interleave import interleave, ratio
from moe_lora.provision.admission.iar import expected_active, immediate_admissibility_rate, min_capacity

from . import provision_reference as reference
from .plan_cases import zipf

Record = Callable[[dict[str, Any], dict[str, Any]], None]

TARGET = 0.95
SIZES = (100, 512, 1_000, 10_000, 100_000, 1_000_000)
PRINTED_SIZES = {100: 7, 200: 5, 512: 3}  # with rounds: the last takes a quarter of a minute each
FIT_FROM = 10_000  # smaller ones are equal work for any number
GOAL_SECONDS, GOAL_BYTES, GOAL_SPEEDUP = 5.0, 10**9, 1000.0
POPULARITIES = ("zipf 1.2", "dirichlet 0.3")
# Of many adapters Zipf's answer is far below the expected active, Dirichlet's just above: both halves of the
# search are timed.
REQUESTS_PER_ADAPTER = (0.5, 1.0)


def popularity(name: str, num_adapters: int) -> np.ndarray:
    """Probabilities of "zipf S" or of a draw of "dirichlet ALPHA"."""
    kind, _, parameter = name.partition(" ")
    if kind == "zipf":
        return zipf(num_adapters, float(parameter))
    return np.random.default_rng(7).dirichlet(np.full(num_adapters, float(parameter)))


class Solver:
    """One way to M*, timed."""

    def __init__(self, solve: Callable[[], int]) -> None:
        self._solve = solve
        self.answer = 0

    def decode(self, num_steps: int) -> float:
        """Seconds of `num_steps` solutions."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self.answer = self._solve()
        return time.perf_counter() - start


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def solve_alone(name: str, num_adapters: int, global_batch: float, rounds: int) -> dict[str, Any]:
    """In a separate process: seconds of each round (the first apart) and peak memory."""
    p = popularity(name, num_adapters)
    before = _peak_bytes()
    solver = Solver(lambda: min_capacity(p, global_batch, TARGET))
    first = solver.decode(1)
    repeats = max(1, min(50, int(0.1 / first)))
    seconds = [solver.decode(repeats) / repeats for _ in range(rounds)]
    return {
        "capacity": solver.answer,
        "expected_active": expected_active(p, global_batch),
        "iar": immediate_admissibility_rate(p, global_batch, solver.answer),
        "first_s": first,
        "median_s": statistics.median(seconds),
        "seconds": seconds,
        "peak_bytes": _peak_bytes(),
        "peak_bytes_before": before,
    }


def against_printed(name: str, num_adapters: int, rounds: int) -> dict[str, Any]:
    """Ours and the vectorised printed algorithm in turn; their answers and the ratio of their times."""
    p, batch = popularity(name, num_adapters), num_adapters / 2
    rate = reference.rate_as_printed_vectorised
    solvers = {
        "ours": Solver(lambda: min_capacity(p, batch, TARGET)),
        "printed": Solver(lambda: reference.min_capacity_by_scan(p, batch, TARGET, rate)),
    }
    times = interleave(
        {"ours": (solvers["ours"].decode, 50, rounds), "printed": (solvers["printed"].decode, 1, rounds)},
        rounds,
    )
    return {
        "capacity": {key: solver.answer for key, solver in solvers.items()},
        "median_s": {key: statistics.median(values) for key, values in times.items()},
        "speedup": ratio(times["printed"], times["ours"]),
    }


def largest_error(name: str, num_adapters: int) -> dict[str, Any]:
    """Our IAR against convolution, from well below to above the expected active adapters."""
    p, batch = popularity(name, num_adapters), float(num_adapters)
    active = expected_active(p, batch)
    errors = {}
    for share in (0.1, 0.5, 0.9, 1.0, 1.01):
        capacity = int(active * share)
        exact = reference.rate_by_convolution(p, reference.residencies(p, batch, capacity, 60), capacity)
        errors[str(capacity)] = abs(immediate_admissibility_rate(p, batch, capacity) - exact)
    return {"errors": errors, "largest": max(errors.values())}


def run(args: argparse.Namespace, record: Record) -> list[str]:
    """Measure, record, and return the goals, met or missed."""
    sizes = [size for size in SIZES if not args.quick or size <= 10_000]
    rounds = 3 if args.quick else 7
    alone = {}
    for name in POPULARITIES:
        for per_adapter in REQUESTS_PER_ADAPTER:
            for size in sizes:
                config = {"part": "solver", "popularity": name, "num_adapters": size, "target": TARGET}
                config["global_batch"] = size * per_adapter
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    result = pool.apply(solve_alone, (name, size, size * per_adapter, rounds))
                record(config, result)
                alone[name, per_adapter, size] = result
    speedups = {}
    for name in POPULARITIES:
        for size, turns in PRINTED_SIZES.items():
            if not args.quick or size <= 100:
                speedups[name, size] = against_printed(name, size, turns)
                config = {"part": "solver against printed", "popularity": name, "num_adapters": size}
                record({**config, "target": TARGET, "global_batch": size / 2}, speedups[name, size])
    errors = []
    for name in POPULARITIES:
        size = 10_000 if args.quick else 100_000
        errors.append(largest_error(name, size))
        record({"part": "solver error", "popularity": name, "num_adapters": size}, errors[-1])
    lines = [f"largest error of IAR against convolution: {max(error['largest'] for error in errors):.1e}"]
    return lines + exponents(alone, record) + goals(alone, speedups)


def exponents(alone: dict[tuple[str, float, int], dict[str, Any]], record: Record) -> list[str]:
    """Slope of log seconds over log N, from 10^4 adapters up and over all sizes."""
    lines = []
    for name in POPULARITIES:
        for per_adapter in REQUESTS_PER_ADAPTER:
            times = {
                key[2]: value["median_s"] for key, value in alone.items() if key[:2] == (name, per_adapter)
            }
            result = {"all": _slope(times)}
            if max(times) > FIT_FROM:
                result["from_10000"] = _slope({size: s for size, s in times.items() if size >= FIT_FROM})
            record({"part": "solver scaling", "popularity": name, "per_adapter": per_adapter}, result)
            slopes = ", ".join(f"{value:.2f} ({key})" for key, value in result.items())
            lines.append(f"{name}, {per_adapter} requests per adapter: seconds ~ N^{slopes}")
    return lines


def _slope(times: dict[int, float]) -> float:
    return float(np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)[0])


def goals(alone: dict[tuple[str, float, int], dict[str, Any]], speedups: dict) -> list[str]:
    """One line per goal with measured sizes."""
    lines = []
    largest = [result for key, result in alone.items() if key[2] == 1_000_000]
    if largest:
        seconds = max(max(result["first_s"], *result["seconds"]) for result in largest)
        peak = max(result["peak_bytes"] for result in largest)
        lines.append(_goal(f"10^6 adapters: slowest {seconds:.2f} s", seconds < GOAL_SECONDS, "< 5 s"))
        lines.append(_goal(f"10^6 adapters: peak {peak / 1e6:.0f} MB", peak < GOAL_BYTES, "< 1 GB"))
    for (name, size), result in speedups.items():
        both, factor = result["capacity"], result["speedup"]["median"]
        same = both["ours"] == both["printed"]
        lines.append(_goal(f"{name}, {size} adapters: M* {both['ours']}, {both['printed']}", same, "equal"))
        if size == 512:
            text = f"{name}, 512 adapters: {factor:.0f} x the printed algorithm's speed"
            lines.append(_goal(text, factor >= GOAL_SPEEDUP, ">= 1000 x"))
    return lines


def _goal(text: str, met: bool, goal: str) -> str:
    return f"{text} (goal {goal}): {'met' if met else 'MISSED'}"
