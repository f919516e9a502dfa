"""How long dLoRA's co-migration takes to plan, exactly and fast, and how far the fast plan is from the exact.

    python -m bench.dlora.bench_solver --out bench/results/dlora_solver.jsonl        # about 4 minutes

Problems are drawn (`uneven_replicas`).  "time": seconds of a plan for 10 ... 1 000 replicas of 8 requests, of
the fast form and of its parts, median and most over the seeds, by the clock and of the processor.
"successive": how far plans one after the other come.  Exact ones up to 30 replicas with a limit of time: what
HiGHS has by then, with its bound; beyond that only how many columns it would have.  "gap": over a grid of
small problems, fast against exact, and against the bound of HiGHS: no plan is below it, and not every optimum
is proven in time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

from bench.harness.records import Recorder
from moe_lora.policies.fast_migration import plan_fast
from moe_lora.policies.migration import MigrationPlan, MigrationProblem, plan_exact

from .uneven_replicas import moved, uneven_problem

SIZES = (10, 30, 100, 300, 1000)
EXACT_SIZES = (10, 30)
NUM_SEEDS = 7
FORMS: dict[str, Callable[[MigrationProblem], MigrationPlan]] = {
    "fast": plan_fast,
    "one round": partial(plan_fast, max_rounds=1),
    "without the linear program": partial(plan_fast, relaxed=False),
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
    seconds, cpu_s, shares, num_moves = [], [], [], []
    FORMS[form](uneven_problem(num_replicas, 0))
    for seed in range(num_seeds):
        problem = uneven_problem(num_replicas, seed)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        plan = FORMS[form](problem)
        seconds.append(time.perf_counter() - begin_s)
        cpu_s.append(time.process_time() - begin_cpu_s)
        shares.append(plan.objective / plan.objective_before)
        num_moves.append(len(plan.moves))
    return {
        "ms": _spread([1e3 * s for s in seconds]),
        "cpu_ms": _spread([1e3 * s for s in cpu_s]),
        "objective_share": _spread(shares),
        "num_moves": _spread(num_moves),
    }


def successive(num_replicas: int, most: int = 64) -> dict[str, Any]:
    """Plans one after the other, each carried out at once, until one moves nothing: seconds of the slowest
    replica after each of the first, and in the end, as shares of those before."""
    problem = uneven_problem(num_replicas, 0)
    shares, first = [], 0.0
    for _ in range(most):
        plan = plan_fast(problem)
        first = first or plan.objective_before
        if not plan.moves:
            break
        shares.append(plan.objective / first)
        problem = moved(problem, plan)
    return {"num_plans": len(shares), "shares": shares[:4], "in_the_end": shares[-1] if shares else 1.0}


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
        "fast_over_bound": fast.objective / plan.bound - 1 if plan.bound else None,
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
            program, alone = (plan_fast(problem, relaxed=relaxed) for relaxed in (True, False))
            yield (
                {**settings, "seed": seed},
                {
                    "proven": found.objective <= found.bound * (1 + 1e-4),
                    "fast_over_exact": fast.objective / found.objective - 1,
                    "fast_over_bound": fast.objective / found.bound - 1,
                    "program_alone_over_bound": program.objective / found.bound - 1,
                    "without_program_over_bound": alone.objective / found.bound - 1,
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
        tell({"part": "successive", "num_replicas": size}, successive(size, 3 if quick else 64))
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
        "goal_met": max(over_bound) <= GOAL,
    }
    tell({"part": "gap, all", "goal": GOAL, "limit_s": gap_limit_s}, summary)


if __name__ == "__main__":
    main()
