"""Do plans hold their own check, and would fewer GPUs have done: five models under 18 loads each.

    python -m bench.provision.bench_plan_check --out bench/results/plan_check.jsonl [--cells 90]

A cell is a model, a rate, a number of adapters and a Zipf exponent; lengths and arrivals are those of the
demo's trace (repeated, scaled to the rate), with Poisson arrivals beside them.  Each cell's plan is made as
`moe-lora provision` makes it, and replayed again with other draws; then a search in the simulator, over more
clusters than the plan was chosen from, looks for fewer GPUs that hold, or for any that do where the plan was
refused.  One JSON line a cell; those that the file has already are skipped, so that a run that was cut short
goes on.  One process.
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
from moe_lora.core.errors import SloError
from moe_lora.provision.plan.checked import PlaceSearch, SizedCluster, checked_plan, place_of, searched_loads
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.inputs import PlanInputs
from moe_lora.provision.plan.memory import KNOWN_MODELS
from moe_lora.provision.plan.plan import Plan, make_plan
from moe_lora.provision.plan.verify import NUM_REQUESTS, OTHER_DRAWS, holds, planned_load, replays, verdicts
from moe_lora.report.results import append_result
from moe_lora.workload.statistics import trace_statistics
from moe_lora.workload.traces.traces import read_trace

from .plan_cases import model_inputs, zipf

TRACE = Path(__file__).parents[2] / "demo" / "trace.csv"
RATES, ADAPTERS, EXPONENTS = (100, 200, 400), (128, 512, 2000), (0.6, 1.2)
STEP = 1  # GPU: of the LoRA Server, the smallest that a cluster can grow by
SEED, SEEDS = 1, (1, 3)  # of the check, as of --verify, and of the search; plans are chosen by 0 and 2
FARTHEST, BUSIEST = 1.5, 1.2  # of the search; a plan's own stops at 1.3 and 1.1
AT_MOST = 8  # clusters of equally many GPUs, twice what a plan tries
PATIENCE = 3  # successive numbers of GPUs without any that holds
MOST_GPUS = 96  # up to which a refused load is searched


def cells() -> Iterator[dict[str, Any]]:
    """Every cell, in an order that mixes them, so that a part of them stands for all."""
    grid = list(itertools.product(RATES, ADAPTERS, EXPONENTS, KNOWN_MODELS))
    random.Random(0).shuffle(grid)
    for rate, adapters, exponent, model in grid:
        yield {"model": model.name, "rate_per_s": rate, "num_adapters": adapters, "zipf": exponent}


def inputs_of(cell: dict[str, Any]) -> PlanInputs:
    """The cell as `moe-lora provision` takes it from its options."""
    load = trace_statistics(TRACE, None)
    return model_inputs(
        cell["model"],
        probabilities=zipf(cell["num_adapters"], cell["zipf"]),
        output_tokens=load.output_tokens.mean,
        context_tokens=load.prompt_tokens.mean + load.output_tokens.mean,
        rate_per_s=float(cell["rate_per_s"]),
    )


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """The plan, its check, and the fewest GPUs that were found to hold."""
    inputs, trace = inputs_of(cell), read_trace(TRACE, limit=NUM_REQUESTS)
    started = time.process_time()
    modelled, refusal = _planned(lambda: make_plan(inputs))
    model_s = time.process_time() - started
    plan, refusal = _planned(lambda: checked_plan(inputs, trace))
    plan_s = time.process_time() - started - model_s
    cluster = Cluster(inputs)
    assert inputs.rate_per_s is not None
    loads = searched_loads(inputs, inputs.rate_per_s, trace, seeds=SEEDS)
    search = PlaceSearch(cluster, loads, farthest=FARTHEST, busiest=BUSIEST)
    result: dict[str, Any] = {
        "modelled": _outline(modelled),
        "plan": _outline(plan),
        "refusal": refusal,
        "model_s": model_s,
        "plan_s": plan_s,
    }
    if plan is None:
        found = _any(search)
    else:
        place = place_of(plan)
        load = planned_load(inputs, inputs.rate_per_s, trace, seed=SEED)
        checked = replays(cluster, place, load)
        result |= {
            "tpot_s": plan.tpot_s,
            "p95_ttft_s": plan.p95_ttft_s,
            "loads_per_s": plan.loads_per_s,
            "links_busy": plan.loading_share,
            "checked": [asdict(one) for one in checked],
            "verdicts": [asdict(one) for one in verdicts(inputs, checked, OTHER_DRAWS)],
            "held": holds(inputs, checked, OTHER_DRAWS),
            "held_strictly": holds(inputs, checked),
        }
        found = _smaller(search, plan.total_gpus) or place
    smallest = None if found is None else _gpus(inputs, found)
    return result | {
        "smallest": None
        if found is None
        else {"layout": str(found.layout), "instances": found.num_instances},
        "smallest_gpus": smallest,
        "excess_gpus": None if plan is None or smallest is None else plan.total_gpus - smallest,
        "wrongly_refused": plan is None and found is not None,
        "num_searched": search.num_replayed,
        "search_s": time.process_time() - started - model_s - plan_s,
    }


def _planned(make: Any) -> tuple[Plan | None, str | None]:
    try:
        return make(), None
    except SloError as error:
        return None, str(error)


def _outline(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    names = ("total_gpus", "instances", "layout", "slots", "capacity", "binding_constraint")
    return {name: getattr(plan, name) for name in names}


def _gpus(inputs: PlanInputs, place: SizedCluster) -> int:
    return place.num_instances * inputs.instance_gpus + place.layout.num_ranks


def _smaller(search: PlaceSearch, num_gpus: int) -> SizedCluster | None:
    """The cluster of fewest GPUs, fewer than these, that holds."""
    found, missed = None, 0
    while missed < PATIENCE and num_gpus > 1:
        num_gpus -= 1
        place = search.holding(num_gpus, AT_MOST)
        found, missed = (found, missed + 1) if place is None else (place, 0)
    return found


def _any(search: PlaceSearch) -> SizedCluster | None:
    """A cluster that holds, of the numbers of GPUs a tenth apart."""
    number = 1
    while number <= MOST_GPUS:
        place = search.holding(number, AT_MOST)
        if place is not None:
            return place
        number += max(1, number // 10)
    return None


def summary(results: list[dict[str, Any]]) -> list[str]:
    """How many plans hold, both kinds of error, and what it took."""
    plans = [one for one in results if one["plan"] is not None]
    refused = [one for one in results if one["plan"] is None]
    excess = [one["excess_gpus"] for one in plans]
    modelled = [one for one in plans if one["modelled"] is not None]
    as_modelled = [one for one in modelled if one["modelled"]["layout"] == one["plan"]["layout"]]
    return [
        f"{len(results)} cells: {len(plans)} plans, {len(refused)} refused",
        f"held within 2 points and 10 %: {sum(one['held'] for one in plans)} of {len(plans)} "
        f"({sum(one['held_strictly'] for one in plans)} without a tolerance)",
        f"more than {STEP} GPU above the smallest found: {sum(one > STEP for one in excess)} "
        f"(by {STEP}: {sum(one == STEP for one in excess)}; most: {max(excess, default=0)})",
        f"wrongly refused: {sum(one['wrongly_refused'] for one in refused)} of {len(refused)}",
        f"the models' layout was kept in {len(as_modelled)} of {len(modelled)} plans",
        f"seconds of processor time: plan {max(one['model_s'] + one['plan_s'] for one in results):.1f} at "
        f"most, all {sum(one['model_s'] + one['plan_s'] + one['search_s'] for one in results):.0f}",
    ]


def main() -> None:
    """Measure the cells that the file lacks, and print what they show together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=int, default=None, help="at most so many more")
    args = parser.parse_args()
    env = environment(args.out)
    records = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if any(one["env"]["git_commit"] != env["git_commit"] for one in records):
        raise SystemExit(f"{args.out} has cells of another commit; begin a new file")
    done = [{name: one["config"][name] for name in next(cells())} for one in records]
    results = [one["result"] for one in records]
    for cell in itertools.islice((cell for cell in cells() if cell not in done), args.cells):
        result = measure(cell)
        append_result(args.out, config=cell | {"trace": TRACE.name}, result=result, env=env, kind="simulated")
        results.append(result)
        print(len(results), cell, {name: result[name] for name in ("plan", "smallest_gpus")}, flush=True)
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
