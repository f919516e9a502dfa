# SPDX-License-Identifier: Apache-2.0
"""Do plans hold their own check, and would fewer GPUs hold: five models under 18 loads each.

    python -m bench.provision.bench_plan_check --out bench/results/plan_check.jsonl [--model NAME]

A cell is a model, a rate, a number of adapters and a Zipf exponent; lengths, prompts and arrivals come from
the demo's trace (repeated, scaled to the rate), with Poisson arrivals beside them.  Each cell's plan is made
as by `moe-lora provision`, and replayed with three other draws; then a simulator search over more clusters of
both kinds looks for fewer GPUs that hold, or for any after a refusal.  One JSON line per cell; skips finished
cells of the file.  One process; several may share the file, each with other models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness.records import environment
from moe_lora.config.plan import PlanGoals
from moe_lora.core.errors import SloError
from moe_lora.provision.plan.checked import PlaceSearch, place_of, searched_loads
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.compared import checked_plan
from moe_lora.provision.plan.coupled_search import CoupledSearch
from moe_lora.provision.plan.inputs import PlanInputs, PromptCount, SizedCluster
from moe_lora.provision.plan.memory import KNOWN_MODELS
from moe_lora.provision.plan.plan import Plan
from moe_lora.provision.plan.verify import OTHER_DRAWS, holds, planned_load, replays, verdicts
from moe_lora.report.results import append_result
from moe_lora.workload.statistics import trace_statistics
from moe_lora.workload.traces.records import Trace
from moe_lora.workload.traces.traces import read_trace

from .plan_cases import model_inputs, zipf

TRACE = Path(__file__).parents[2] / "demo" / "trace.csv"
RATES, ADAPTERS, EXPONENTS = (100, 200, 400), (128, 512, 2000), (0.6, 1.2)
STEP = 1  # GPU: of the LoRA Server, the smallest growth of a cluster
CHECKS, SEEDS = (1, 4, 5), (1, 3)  # of the check (1: --verify) and of the search; plans are chosen by 0, 2
FARTHEST, BUSIEST = 1.7, 1.3  # of the search; a plan's own stops at 1.5 and 1.2
AT_MOST = 8  # clusters of equally many GPUs, twice a plan's tries
PATIENCE = 3  # successive numbers of GPUs without success
MOST_GPUS = 96  # limit of the search for a refused load


def cells() -> Iterator[dict[str, Any]]:
    """Every cell, in a mixed order, so that a part represents the whole."""
    grid = list(itertools.product(RATES, ADAPTERS, EXPONENTS, KNOWN_MODELS))
    random.Random(0).shuffle(grid)
    for rate, adapters, exponent, model in grid:
        yield {"model": model.name, "rate_per_s": rate, "num_adapters": adapters, "zipf": exponent}


def inputs_of(cell: dict[str, Any]) -> PlanInputs:
    """The cell as options of `moe-lora provision`."""
    prompts = PromptCount()
    load = trace_statistics(TRACE, each=prompts.add)
    return model_inputs(
        cell["model"],
        probabilities=zipf(cell["num_adapters"], cell["zipf"]),
        output_tokens=load.output_tokens.mean,
        context_tokens=load.prompt_tokens.mean + load.output_tokens.mean,
        rate_per_s=float(cell["rate_per_s"]),
        prompts=prompts.load(),
        slo_ttft_s=PlanGoals().slo_ttft_s,
    )


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """The plan, its check, and the fewest GPUs found to hold."""
    inputs, trace = inputs_of(cell), read_trace(TRACE)
    started = time.process_time()
    plan, refusal = _planned(lambda: checked_plan(inputs, trace))
    plan_s = time.process_time() - started
    cluster = Cluster(inputs)
    assert inputs.rate_per_s is not None
    whole = planned_load(inputs, inputs.rate_per_s, trace, seed=SEEDS[0])
    loads = [*searched_loads(inputs, inputs.rate_per_s, trace, seeds=SEEDS), whole]
    served = PlaceSearch(cluster, lambda _: loads, farthest=FARTHEST, busiest=BUSIEST)
    coupled = CoupledSearch(cluster, lambda _: loads)
    result: dict[str, Any] = {"plan": _outline(plan), "refusal": refusal, "plan_s": plan_s}
    if plan is None:
        smallest = _any(inputs, served, coupled)
    else:
        result |= _checked(inputs, cluster, plan, trace)
        smallest = _fewer(inputs, served, coupled, plan.total_gpus) or plan.total_gpus
    return result | {
        "smallest_gpus": smallest,
        "excess_gpus": None if plan is None or smallest is None else plan.total_gpus - smallest,
        "wrongly_refused": plan is None and smallest is not None,
        "search_s": time.process_time() - started - plan_s,
    }


def _checked(inputs: PlanInputs, cluster: Cluster, plan: Plan, trace: Trace) -> dict[str, Any]:
    """The plan's replays by other draws."""
    assert inputs.rate_per_s is not None
    draws = [
        replays(cluster, place_of(plan), planned_load(inputs, inputs.rate_per_s, trace, seed=seed))
        for seed in CHECKS
    ]
    return {
        "tpot_s": plan.tpot_s,
        "p95_ttft_s": plan.p95_ttft_s,
        "prompt_share": plan.prompt_share,
        "checked": [[asdict(one) for one in found] for found in draws],
        "verdicts": [[asdict(one) for one in verdicts(inputs, found, OTHER_DRAWS)] for found in draws],
        "draws_held": [holds(inputs, found, OTHER_DRAWS) for found in draws],
        "held": all(holds(inputs, found, OTHER_DRAWS) for found in draws),
        "held_strictly": all(holds(inputs, found) for found in draws),
    }


def _planned(make: Any) -> tuple[Plan | None, str | None]:
    try:
        return make(), None
    except SloError as error:
        return None, str(error)


def _outline(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    names = ("kind", "total_gpus", "instances", "layout", "slots", "capacity", "compared")
    bound = plan.lower_bound.gpus if plan.lower_bound else None
    return {name: getattr(plan, name) for name in names} | {"lower_bound": bound}


def _holding(
    inputs: PlanInputs, served: PlaceSearch, coupled: CoupledSearch, num_gpus: int
) -> SizedCluster | None:
    """A cluster of either kind, of so many GPUs."""
    number, rest = divmod(num_gpus, inputs.instance_gpus)
    found = coupled.holding(number) if number and not rest else None
    return found or served.holding(num_gpus, AT_MOST)


def _fewer(inputs: PlanInputs, served: PlaceSearch, coupled: CoupledSearch, num_gpus: int) -> int | None:
    """The fewest GPUs, below these, that hold."""
    smallest, missed = None, 0
    while missed < max(PATIENCE, inputs.instance_gpus) and num_gpus > 1:
        num_gpus -= 1
        found = _holding(inputs, served, coupled, num_gpus)
        smallest, missed = (smallest, missed + 1) if found is None else (num_gpus, 0)
    return smallest


def _any(inputs: PlanInputs, served: PlaceSearch, coupled: CoupledSearch) -> int | None:
    """GPUs that hold, of numbers a tenth apart."""
    number = 1
    while number <= MOST_GPUS:
        if _holding(inputs, served, coupled, number) is not None:
            return number
        number += max(1, number // 10)
    return None


def summary(results: list[dict[str, Any]]) -> list[str]:
    """Number of plans that hold, both kinds of error, and costs."""
    plans = [one for one in results if one["plan"] is not None]
    refused = [one for one in results if one["plan"] is None]
    excess = [one["excess_gpus"] for one in plans]
    coupled = [one for one in plans if one["plan"]["kind"] == "coupled"]
    return [
        f"{len(results)} cells: {len(plans)} plans, {len(refused)} refused",
        f"held by {len(CHECKS)} draws within 2 points and 10 %: {sum(one['held'] for one in plans)} of "
        f"{len(plans)} "
        f"({sum(one['held_strictly'] for one in plans)} without a tolerance)",
        f"more than {STEP} GPU above the smallest found: {sum(one > STEP for one in excess)} "
        f"(by {STEP}: {sum(one == STEP for one in excess)}; most: {max(excess, default=0)})",
        f"wrongly refused: {sum(one['wrongly_refused'] for one in refused)} of {len(refused)}",
        f"coupled: {len(coupled)} of {len(plans)} plans",
        f"seconds of processor time: plan {max(one['plan_s'] for one in results):.1f} at most, all "
        f"{sum(one['plan_s'] + one['search_s'] for one in results):.0f}",
    ]


def main() -> None:
    """Measure the cells missing in the file, and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=int, default=None, help="at most so many more")
    names = [model.name for model in KNOWN_MODELS]
    parser.add_argument(
        "--model", action="append", choices=names, help="only cells of these models; repeatable"
    )
    args = parser.parse_args()
    env = environment(args.out)
    records = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if any(one["env"]["git_commit"] != env["git_commit"] for one in records):
        raise SystemExit(f"{args.out} has cells of another commit; begin a new file")
    done = [{name: one["config"][name] for name in next(cells())} for one in records]
    results = [one["result"] for one in records]
    wanted = (cell for cell in cells() if cell not in done and cell["model"] in (args.model or names))
    for cell in itertools.islice(wanted, args.cells):
        result = measure(cell)
        append_result(args.out, config=cell | {"trace": TRACE.name}, result=result, env=env, kind="simulated")
        results.append(result)
        print(len(results), cell, {name: result[name] for name in ("plan", "smallest_gpus")}, flush=True)
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
