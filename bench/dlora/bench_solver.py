# SPDX-License-Identifier: Apache-2.0
"""Planning time of dLoRA's co-migration, exact and fast, and the fast plan's gap.

    python -m bench.dlora.bench_solver --out bench/results/dlora_solver.jsonl        # about 4 minutes

Problems are drawn (`uneven_replicas`).  "time": seconds of a plan for 10 ... 1 000 replicas of 8 requests,
fast and by dLoRA's linear program, median and most over the seeds, wall and processor, and the excess over
`lower_bound`.  Exact plans up to 30 replicas with a time limit: HiGHS's best by then, with its bound; beyond,
only the number of columns.  "gap": over a grid of small problems, both against exact, and against the better
bound of HiGHS and `lower_bound`: not every optimum is proven in time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from bench.harness.records import Recorder
from moe_lora.policies.migration.fast import plan_fast
from moe_lora.policies.migration.problem import MigrationPlan, MigrationProblem, Placement, lower_bound
from moe_lora.policies.migration.programs import plan_exact, plan_relaxed

from .uneven_replicas import uneven_problem

SIZES = (10, 30, 100, 300, 1000)
EXACT_SIZES = (10, 30)
NUM_SEEDS = 7
FORMS: dict[str, Callable[[MigrationProblem], MigrationPlan]] = {
    "fast": plan_fast,
    "relaxed": plan_relaxed,
}
GRID = {
    "num_replicas": (2, 3, 4, 6),
    "requests_per_replica": (6, 12),
    "affinity_s": (0.0, 0.05, 0.5),
    "device_bytes": (150.0, 400.0),
}
GOAL = 0.05


def timed(num_replicas: int, form: str, num_seeds: int) -> dict[str, Any]:
    """Of one form; the first problem is planned once more, ahead, and not counted."""
    seconds, cpu_s, over_bound, shares, num_moves = [], [], [], [], []
    FORMS[form](uneven_problem(num_replicas, 0))
    for seed in range(num_seeds):
        problem = uneven_problem(num_replicas, seed)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        plan = FORMS[form](problem)
        seconds.append(time.perf_counter() - begin_s)
        cpu_s.append(time.process_time() - begin_cpu_s)
        over_bound.append(plan.objective / lower_bound(Placement(problem)) - 1)
        shares.append(plan.objective / plan.objective_before)
        num_moves.append(len(plan.moves))
    return {
        "ms": _spread([1e3 * s for s in seconds]),
        "cpu_ms": _spread([1e3 * s for s in cpu_s]),
        "over_bound": _spread(over_bound),
        "objective_share": _spread(shares),
        "num_moves": _spread(num_moves),
    }


def exact(num_replicas: int, limit_s: float) -> dict[str, Any]:
    problem = uneven_problem(num_replicas, 0)
    begin_s = time.perf_counter()
    plan = plan_exact(problem, time_limit_s=limit_s)
    seconds = time.perf_counter() - begin_s
    fast = plan_fast(problem)
    return {
        "s": seconds,
        "objective": plan.objective,
        "bound": plan.bound,
        "proven": plan.objective <= plan.bound * (1 + 1e-4),
        "fast_over_exact": fast.objective / plan.objective - 1,
        "fast_over_bound": fast.objective / max(plan.bound, fast.bound) - 1,
        "num_columns": _num_columns(problem),
    }


def gaps(limit_s: float, seeds: int, *, quick: bool) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every cell of the grid, every seed: fast over exact, and over the bound."""
    cells = list(product(*GRID.values()))
    for cell in cells[:: len(cells) // 3] if quick else cells:
        settings: dict[str, Any] = dict(zip(GRID, cell, strict=True))
        for seed in range(seeds):
            problem = uneven_problem(seed=seed, num_adapters=8, **settings)
            found, fast = plan_exact(problem, time_limit_s=limit_s), plan_fast(problem)
            relaxed = plan_relaxed(problem)
            bound = max(found.bound, fast.bound)
            yield (
                {**settings, "seed": seed},
                {
                    "proven": found.objective <= found.bound * (1 + 1e-4),
                    "fast_over_exact": fast.objective / found.objective - 1,
                    "fast_over_bound": fast.objective / bound - 1,
                    "relaxed_over_exact": relaxed.objective / found.objective - 1,
                    "relaxed_over_bound": relaxed.objective / bound - 1,
                    "num_moves": [len(fast.moves), len(found.moves)],
                },
            )


def _num_columns(problem: MigrationProblem) -> int:
    used = {one.adapter for one in problem.requests}
    return 1 + len(problem.replicas) * (2 * len(problem.requests) + len(used))


def _spread(values: list[Any]) -> dict[str, float]:
    return {"median": statistics.median(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="does it run?")
    arguments = parser.parse_args()
    quick = arguments.quick
    sizes, num_seeds = ((10, 100), 2) if quick else (SIZES, NUM_SEEDS)
    limit_s, gap_limit_s, gap_seeds = (1.0, 0.5, 1) if quick else (20.0, 2.0, 1)
    record = Recorder(arguments.out)

    def tell(config: dict[str, Any], result: dict[str, Any]) -> None:
        record(config, result)
        print(json.dumps(config), json.dumps(result), flush=True)

    for size in sizes:
        for form in FORMS:
            tell({"part": "time", "num_replicas": size, "form": form}, timed(size, form, num_seeds))
        if size in EXACT_SIZES:
            tell(
                {"part": "time", "num_replicas": size, "form": "exact", "limit_s": limit_s},
                exact(size, limit_s),
            )
        else:
            columns = {"num_columns": _num_columns(uneven_problem(size, 0))}
            tell({"part": "time", "num_replicas": size, "form": "exact, not tried"}, columns)
    found = []
    for config, result in gaps(gap_limit_s, gap_seeds, quick=quick):
        tell({"part": "gap", "limit_s": gap_limit_s, **config}, result)
        found.append(result)
    over_bound = [one["fast_over_bound"] for one in found]
    over_exact = [one["fast_over_exact"] for one in found]
    summary = {
        "num_problems": len(found),
        "num_proven": sum(one["proven"] for one in found),
        "fast_over_bound": _spread(over_bound) | {"mean": statistics.mean(over_bound)},
        "fast_over_exact": _spread(over_exact) | {"mean": statistics.mean(over_exact)},
        "relaxed_over_exact": _spread([one["relaxed_over_exact"] for one in found]),
        "goal_met": max(over_exact) <= GOAL,
    }
    tell({"part": "gap, all", "goal": GOAL, "limit_s": gap_limit_s}, summary)


if __name__ == "__main__":
    main()
