# SPDX-License-Identifier: Apache-2.0
"""The estimator part of `bench_provision`: both models of admission beside a simulation of waiting requests.

A cell is a popularity, a number of adapters, a global batch and a capacity from 0.7 to 1.3 times the expected
number of active adapters.  One JSON line per row of cells with different capacities.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.provision.slot_queue import AdmissionResult, simulate_admission
from moe_lora.provision.admission.corrected import corrected_admissibility_rate
from moe_lora.provision.admission.iar import expected_active, immediate_admissibility_rate

from .plan_cases import zipf

GOAL = 0.02
FACTORS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
NUM_ADAPTERS = (64, 512, 4096)
PER_ADAPTER = (0.25, 1.0)  # global batch by number of adapters
MIN_ARRIVALS = 200_000
MIN_SERVICE_TIMES = 100  # simulated, in mean service times: large batches need more arrivals
LARGEST_STANDARD_ERROR = 0.004  # of the simulated rate; above, it is simulated again ...
LONGER = 6  # ... so many times as long ...
MAX_ARRIVALS = 10_000_000  # ... up to this
MODELS = ("paper", "corrected")

Record = Callable[[dict[str, Any], dict[str, Any]], None]


def two_level(num_adapters: int, num_hot: int, hot_mass: float) -> np.ndarray:
    probabilities = np.full(num_adapters, (1 - hot_mass) / (num_adapters - num_hot))
    probabilities[:num_hot] = hot_mass / num_hot
    return probabilities


def dirichlet(num_adapters: int, concentration: float) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.full(num_adapters, concentration))


SHAPES: dict[str, Callable[[int], np.ndarray]] = {
    "zipf 0.6": lambda n: zipf(n, 0.6),
    "zipf 1.0": lambda n: zipf(n, 1.0),
    "zipf 1.2": lambda n: zipf(n, 1.2),
    "zipf 1.5": lambda n: zipf(n, 1.5),
    "two-level, 10% have 90%": lambda n: two_level(n, n // 10, 0.9),
    "two-level, 20% have 60%": lambda n: two_level(n, n // 5, 0.6),
    "dirichlet 0.1": lambda n: dirichlet(n, 0.1),
    "dirichlet 0.3": lambda n: dirichlet(n, 0.3),
    "dirichlet 1": lambda n: dirichlet(n, 1.0),
    "dirichlet 5": lambda n: dirichlet(n, 5.0),
    "one hot, 50%": lambda n: two_level(n, 1, 0.5),
    "one hot, 90%": lambda n: two_level(n, 1, 0.9),
    "uniform": lambda n: np.full(n, 1 / n),
}


def simulate(probabilities: np.ndarray, global_batch: float, capacity: int, quick: bool) -> AdmissionResult:
    """The reference simulation of a cell, longer for uncertain cells."""
    num_arrivals = max(MIN_ARRIVALS, int(MIN_SERVICE_TIMES * global_batch)) // (10 if quick else 1)
    result = simulate_admission(probabilities, global_batch, capacity, num_arrivals=num_arrivals, seed=0)
    longest = 0 if quick else MAX_ARRIVALS
    while result.standard_error > LARGEST_STANDARD_ERROR and num_arrivals * LONGER <= longest:
        num_arrivals *= LONGER
        result = simulate_admission(probabilities, global_batch, capacity, num_arrivals=num_arrivals, seed=1)
    return result


def measure_cell(
    probabilities: np.ndarray, global_batch: float, capacity: int, quick: bool
) -> dict[str, Any]:
    """The three rates at one capacity, and the corrected rate's seconds."""
    simulated = simulate(probabilities, global_batch, capacity, quick)
    started = time.perf_counter()
    corrected = corrected_admissibility_rate(probabilities, global_batch, capacity)
    return {
        "capacity": capacity,
        "corrected_s": time.perf_counter() - started,
        "simulated": simulated.immediate_admissibility_rate,
        "standard_error": simulated.standard_error,
        "num_arrivals": simulated.num_arrivals,
        "corrected": corrected,
        "paper": immediate_admissibility_rate(probabilities, global_batch, capacity),
    }


def measure_row(probabilities: np.ndarray, global_batch: float, quick: bool) -> dict[str, Any]:
    """Cells at each factor; worst errors of the models over them."""
    active = expected_active(probabilities, global_batch)
    capacities = sorted({min(len(probabilities), max(1, round(factor * active))) for factor in FACTORS})
    cells = [measure_cell(probabilities, global_batch, capacity, quick) for capacity in capacities]
    worst = {model: max(abs(cell[model] - cell["simulated"]) for cell in cells) for model in MODELS}
    return {"expected_active": active, "worst_error": worst, "cells": cells}


def run(args: argparse.Namespace, record: Record) -> list[str]:
    """Measure the grid, record each row; the lines of the table and of the goals."""
    lines = [f"{'popularity':24}{'adapters':>9}{'batch':>6}   worst error in points, paper and corrected"]
    cells: list[dict[str, Any]] = []
    for shape, make in SHAPES.items():
        for num_adapters in NUM_ADAPTERS[:1] if args.quick else NUM_ADAPTERS:
            for per_adapter in PER_ADAPTER:
                batch = per_adapter * num_adapters
                row = measure_row(make(num_adapters), batch, args.quick)
                record({"shape": shape, "num_adapters": num_adapters, "global_batch": batch}, row)
                worst = [f"{100 * row['worst_error'][model]:6.2f}" for model in MODELS]
                lines.append(f"{shape:24}{num_adapters:9}{batch:6.0f}   {' '.join(worst)}")
                cells += row["cells"]
    return lines + goals(cells)


def goals(cells: list[dict[str, Any]]) -> list[str]:
    """Share of the cells within 2 points of the simulation, worst cell and slowest answer."""
    lines = []
    for model in MODELS:
        errors = [abs(cell[model] - cell["simulated"]) for cell in cells]
        within = sum(error <= GOAL for error in errors)
        worst = int(np.argmax(errors))
        lines.append(
            f"{model}: {within} of {len(cells)} cells within {100 * GOAL:.0f} points of simulation, worst "
            f"{100 * errors[worst]:.2f} (standard error {100 * cells[worst]['standard_error']:.2f})"
        )
    slowest = max(cell["corrected_s"] for cell in cells)
    return [*lines, f"corrected: at most {slowest:.2f} s an answer (goal 1 s)"]
