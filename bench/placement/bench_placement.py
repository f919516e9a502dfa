# SPDX-License-Identifier: Apache-2.0
"""How good placements are on LoRAServe's popularities, and how long they take to find.

    python -m bench.placement.bench_placement --out bench/results/placement.jsonl

Quality ("simulated": no engine runs): time steps of each popularity, requests drawn from it; every method
places by the demand forecast from the steps before and is judged by the step's own (forecast: true), or
knows it (forecast: false).  Then the bounded optimiser against the exact solver on small clusters.  Cost
("measured"): seconds for 10 000 adapters on 100 servers, first and from a previous table, by the clock and
of the processor: least, median, most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.harness.records import Recorder
from moe_lora.policies.routing.demand import DemandForecast
from moe_lora.provision.placement.optimal import OptimalPlacement, optimal_placement
from moe_lora.provision.placement.placement import PLACEMENTS
from moe_lora.provision.placement.placement_problem import (
    Placed,
    Table,
    placement_problem,
    placement_quality,
)
from moe_lora.workload.popularity.named import parse_popularity

from .placement_exact import exact_worst_load

PARTS = ("quality", "exact", "cost")
POPULARITIES = ["uniform", "shifting", "exponential", "power:3", "production"]
SIZES = [(25, 4), (100, 4), (200, 4), (300, 12)]
NUM_STEPS, REQUESTS_PER_STEP, TOKENS_PER_REQUEST, STEP_S = 12, 3000, 640, 60.0
TIMES_128 = {"tp1": 2.7, "tp8": 1.2}
"""Time of a token at rank 128, relative to rank 8 (LoRAServe, sections III-A1 and III-A3)."""
TOKENS_PER_S = 10_000.0
BOUND = 0.05
"""Share of all adapters' bytes that the bounded optimiser may copy in a step."""
TIGHT_BOUND = 0.001
"""For the cost of the bound: 0.05 would not bind."""
NUM_PAIRS, GOAL_S = 7, 1.0
Place = Callable[..., Table]


def _optimum(
    adapters: dict[str, int],
    servers: list[int],
    points: dict[int, float],
    demand: dict[str, float],
    previous: Placed | None = None,
    **options: Any,
) -> OptimalPlacement:
    problem = placement_problem(adapters, servers, points, demand)
    return optimal_placement(problem, problem.shares(previous), **options)


def _optimal(*arguments: Any, **options: Any) -> Table:
    return _optimum(*arguments, **options).table


def methods(adapters: dict[str, int], share: float = BOUND) -> dict[str, Place]:
    bound = share * sum(adapters.values())
    return {
        **PLACEMENTS,
        "optimal_no_slack": _optimal,
        "optimal_bounded": partial(_optimal, slack=0.05, max_copied_bytes=bound),
    }


def operating_points(times_128: float) -> dict[int, float]:
    return {8: TOKENS_PER_S, 128: TOKENS_PER_S / times_128}


def demands(popularity: str, num_adapters: int) -> tuple[dict[str, int], list[dict[str, float]]]:
    """Ranks, and tokens of each adapter in each step."""
    names = [f"a{index:05}" for index in range(num_adapters)]
    choice = parse_popularity(f"loraserve:{popularity}", names)
    rng = np.random.default_rng(0)
    steps = []
    for step in range(NUM_STEPS):
        shares = choice.at(step / (NUM_STEPS - 1)).probabilities
        counts = rng.multinomial(REQUESTS_PER_STEP, shares)
        steps.append({n: float(c * TOKENS_PER_REQUEST) for n, c in zip(names, counts, strict=True)})
    return dict(zip(names, choice.lora_ranks, strict=True)), steps


def quality(popularity: str, size: tuple[int, int], points: dict[int, float], *, forecast: bool) -> Iterator:
    adapters, steps = demands(popularity, size[0])
    servers = list(range(size[1]))
    for name, place in methods(adapters).items():
        forecaster, rows = DemandForecast(), []
        table: Table | None = None
        for tokens in steps:
            demand = {adapter: number / STEP_S for adapter, number in tokens.items()}
            known = forecaster.read() or demand if forecast else demand
            previous, table = table, place(adapters, servers, points, known, table)
            found = placement_quality(table, adapters, servers, points, demand, previous)
            least = _optimum(adapters, servers, points, demand).optimum
            rows.append((found, least))
            forecaster.observe(tokens, STEP_S)
        yield name, _summary(rows, sum(adapters.values()))


def _summary(rows: list, all_bytes: float) -> dict[str, float]:
    """Means over steps; copies as shares of all adapters' bytes, per step after the first."""
    mean = statistics.fmean
    return {
        "worst_load_over_lp_bound": mean(q.worst_load / q.target_utilisation for q, _ in rows),
        "worst_padded_load_over_lp_bound": mean(q.worst_padded_load / q.target_utilisation for q, _ in rows),
        "worst_padded_load_over_optimum": mean(q.worst_padded_load / least for q, least in rows),
        "optimum_over_lp_bound": mean(least / q.target_utilisation for q, least in rows),
        "rank_mixing": mean(q.rank_mixing for q, _ in rows),
        "most_held": mean(q.most_held for q, _ in rows),
        "mean_held": mean(q.mean_held for q, _ in rows),
        "copied_share_per_step": sum(q.copied_bytes for q, _ in rows) / all_bytes / (len(rows) - 1),
        "num_copies": sum(q.num_copies for q, _ in rows),
    }


def against_exact(num_cases: int) -> dict[str, float]:
    """Worst load of the bounded optimiser over the exact one's, 6 adapters on 3 servers, from any table."""
    rng = np.random.default_rng(1)
    points = operating_points(TIMES_128["tp1"])
    ratios, stays = [], []
    for _ in range(num_cases):
        adapters = {f"a{index}": int(rng.choice([8, 32, 128])) for index in range(6)}
        demand = {name: float(rng.exponential(1000.0)) for name in adapters}
        previous = {name: [(int(rng.integers(3)), 1.0)] for name in adapters}
        bound = float(rng.integers(0, 300))
        case = (adapters, [0, 1, 2], points, demand)
        exact = exact_worst_load(*case, previous, max_copied_bytes=bound)
        found = _optimum(*case, previous, max_copied_bytes=bound)
        ratios.append(found.worst_load / exact)
        stays.append(placement_quality(previous, *case).worst_padded_load / exact)
    return {
        "median": statistics.median(ratios),
        "p90": float(np.quantile(ratios, 0.9)),
        "max": max(ratios),
        "staying_median": statistics.median(stays),
        "num_cases": num_cases,
    }


def cost(num_adapters: int, num_servers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    rng = np.random.default_rng(2)
    adapters = {f"a{i:05}": int((8, 16, 32, 64, 128)[i % 5]) for i in range(num_adapters)}
    servers, points = list(range(num_servers)), operating_points(TIMES_128["tp1"])
    demand = {name: 1e5 / (1 + index) for index, name in enumerate(adapters)}
    later = {name: value * float(rng.uniform(0.5, 2.0)) for name, value in demand.items()}
    places = methods(adapters, TIGHT_BOUND)
    tables = {name: place(adapters, servers, points, demand) for name, place in places.items()}
    times: dict[str, defaultdict[str, list[float]]] = {name: defaultdict(list) for name in places}
    for _ in range(NUM_PAIRS):
        for name, place in places.items():
            for kind, wanted, previous in (("first", demand, None), ("from_previous", later, tables[name])):
                begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                place(adapters, servers, points, wanted, previous)
                times[name][kind].append(time.perf_counter() - begin_s)
                times[name][f"{kind}_cpu"].append(time.process_time() - begin_cpu_s)
    for name, kinds in times.items():
        yield name, {f"{kind}_s": [min(t), statistics.median(t), max(t)] for kind, t in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--quick", action="store_true", help="does it run?")
    arguments = parser.parse_args()
    popularities, sizes = (["shifting"], [(25, 4)]) if arguments.quick else (POPULARITIES, SIZES)
    num_exact, cost_size = (2, (200, 4)) if arguments.quick else (100, (10_000, 100))
    record = Recorder(arguments.out, kind="simulated")

    def tell(config: dict[str, Any], result: dict[str, Any], kind: str = "simulated") -> None:
        record(config, result, kind)
        print(json.dumps(config), json.dumps(result))

    for size in sizes if "quality" in arguments.part else ():
        for popularity in popularities:
            for points, times_128 in TIMES_128.items():
                for forecast in (True, False):
                    found = quality(popularity, size, operating_points(times_128), forecast=forecast)
                    config = {"popularity": popularity, "points": points, "forecast": forecast}
                    tell({"part": "quality", "size": _text(size), **config}, dict(found))
    if "exact" in arguments.part:
        tell({"part": "exact", "size": "6x3"}, against_exact(num_exact))
    for name, result in cost(*cost_size) if "cost" in arguments.part else ():
        result["goal_met"] = result["from_previous_s"][1] < GOAL_S
        tell({"part": "cost", "size": _text(cost_size), "method": name}, result, "measured")


def _text(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


if __name__ == "__main__":
    main()
