# SPDX-License-Identifier: Apache-2.0
"""LoRAServe's clusters (sections V-E to V-G): highest rates within the SLO, and fewest servers for a rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.harness.peak import highest_rate
from moe_lora.provision.operating_points import PointLoad, SloGoal
from moe_lora.provision.placement.placement import PLACEMENTS, random_placement
from moe_lora.provision.placement.placement_problem import Table
from moe_lora.provision.replayed.running import SimRequest
from moe_lora.provision.replayed.system import System
from moe_lora.provision.replayed.system import simulate as run_system
from moe_lora.provision.replayed.system_config import SystemConfig
from moe_lora.workload.popularity.named import parse_popularity
from moe_lora.workload.statistics import percentile

from .cluster_sim_plan import Load, Systems, simulated_points, step_models

SLO_TTFT_S = 10.0
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""LoRAServe, figure 6."""
NUM_MODULES = 4
"""Q, K, V and O (LoRAServe, section III-A1)."""
ADAPTERS_PER_SERVER = 25
PEAK_PRECISION = 0.05
REFERENCE = "loraserve"
AT = (0.8, 1.0)
"""Shares of the reference's highest rate for comparisons."""
NUM_DRAWS = 3
"""Of random placements; the median counts."""
EVERYWHERE = ("rank_aware", "least_outstanding")
SYSTEMS = (REFERENCE, "optimal", "random", "contiguous", *(f"everywhere, {name}" for name in EVERYWHERE))
Rows = Iterator[tuple[dict[str, Any], dict[str, Any]]]


def loraserve_cells(*, quick: bool) -> Iterator[tuple[dict[str, Any], Callable[[], Rows]]]:
    """(name, runner)."""
    length_s = 60.0 if quick else 200.0
    small = [("production", 4)]
    sizes = {
        "padded": [*small, ("production", 8), ("production", 12), ("shifting", 4)],
        "true_rank": [*small, ("production", 12)],
        "roofline": small,
    }
    for model, of_model in ({"padded": small} if quick else sizes).items():
        for popularity, number in of_model:
            name = {"study": "weak_scaling", "model": model, "popularity": popularity, "num_servers": number}
            yield name, partial(weak_scaling, model, popularity, number, length_s)
    if not quick:
        name = {"study": "fewest_servers", "model": "padded", "popularity": "production"}
        yield name, partial(fewest_servers, "padded", length_s)


def weak_scaling(model: str, popularity: str, num_servers: int, length_s: float) -> Rows:
    """Highest rate within the SLO of each system, and all systems at shares of the reference's."""
    systems = loraserve_systems(model, popularity, ADAPTERS_PER_SERVER * num_servers, length_s)
    peaks: dict[str, float] = {}
    for name in SYSTEMS:
        guess = peaks.get(REFERENCE, 4.0 * num_servers)
        draws = [peak_rate(systems, made, num_servers, guess) for made in contestants(name)]
        peaks[name] = median(draws)
        rates = [share * peaks[REFERENCE] for share in AT]
        result = {"peak_per_s": peaks[name], "peaks_per_s": draws, "operating_points": dict(systems.points)}
        result["points"] = [_at(systems, name, num_servers, rate) for rate in rates]
        yield {"num_adapters": len(systems.load.ranks), "system": name}, result


def fewest_servers(model: str, length_s: float) -> Rows:
    """Servers of each system for the reference's load on 8, less 5 %, 200 adapters."""
    systems = loraserve_systems(model, "production", 200, length_s)
    rate = 0.95 * peak_rate(systems, next(contestants(REFERENCE)), 8, 32.0)
    for name in SYSTEMS:
        found = []
        for made in contestants(name):
            number = 4
            while not holds(systems, made(systems, number, rate), rate):
                number += 1
            found.append(number)
        config = {"num_adapters": 200, "rate_per_s": rate, "system": name}
        yield config, {"num_servers": median(found), "draws": found}


Made = Callable[[Systems, int, float], SystemConfig]


def contestants(name: str) -> Iterator[Made]:
    """Makers of the named system, by number of servers and rate; several for random systems."""
    if name == "random":
        for seed in range(NUM_DRAWS):
            yield partial(_placed, partial(random_placement, seed=seed))
    elif name in PLACEMENTS:
        yield partial(_placed, PLACEMENTS[name])
    else:
        yield partial(routed, name.removeprefix("everywhere, "))


def _placed(place: Callable[..., Table], systems: Systems, num_servers: int, rate: float) -> SystemConfig:
    return systems.placed(place, num_servers, rate)


def routed(routing: str, systems: Systems, num_servers: int, rate: float) -> SystemConfig:
    return systems.routed(routing, num_servers)


def loraserve_systems(model: str, popularity: str, num_adapters: int, length_s: float) -> Systems:
    """Prompts and answers of LoRAServe's figure 6, its popularities."""
    names = [f"a{index:05}" for index in range(num_adapters)]
    choice = parse_popularity(f"loraserve:{popularity}", names)
    load = Load(
        popularity=choice,
        ranks=dict(zip(names, choice.lora_ranks, strict=True)),
        lengths=lambda count, _: ([PROMPT_TOKENS] * count, [OUTPUT_TOKENS] * count),
        tokens_per_request=PROMPT_TOKENS + OUTPUT_TOKENS,
        num_modules=NUM_MODULES,
        duration_s=length_s,
        since_s=0.2 * length_s,
    )
    steps = step_models(NUM_MODULES)[model]
    one = PointLoad(
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        num_adapters=8,
        num_requests=200,
        duration_s=300.0,
    )
    slo = SloGoal(ttft_s=SLO_TTFT_S, tpot_s=1.0)
    points = simulated_points(steps, sorted(set(load.ranks.values())), one, slo)
    return Systems(load=load, model=steps, points=points, mean_output_tokens=OUTPUT_TOKENS)


def peak_rate(systems: Systems, made: Made, num_servers: int, guess: float) -> float:
    """Highest requests/s with P95 TTFT <= 10 s, by bisection after a bracket was found from the guess."""

    def is_met(rate: float) -> bool:
        return holds(systems, made(systems, num_servers, rate), rate)

    return highest_rate(is_met, guess, step=1.2, precision=PEAK_PRECISION)


def holds(systems: Systems, config: SystemConfig, rate: float) -> bool:
    """True if at most 5 % of the judged requests exceed the SLO; stops early on failure."""
    plan, since_s = systems.load.plan(rate), systems.load.since_s
    num_late_allowed = 0.05 * sum(request.arrival_s >= since_s for request in plan)
    num_late = 0

    def give_up(request: SimRequest) -> bool:
        nonlocal num_late
        is_late = request.first_token_s - request.arrival_s > SLO_TTFT_S
        num_late += is_late and request.arrival_s >= since_s
        return num_late > num_late_allowed

    return not run_system(config, plan, give_up).stopped


def _at(systems: Systems, name: str, num_servers: int, rate: float) -> dict[str, Any]:
    """Means over the draws of a system at one rate."""
    plan = systems.load.plan(rate)
    found = [
        judged(run_system(made(systems, num_servers, rate), plan), systems, num_servers)
        for made in contestants(name)
    ]
    return {"rate_per_s": rate} | {key: fmean(one[key] for one in found) for key in found[0]}


def judged(result: System, systems: Systems, num_servers: int) -> dict[str, float]:
    """tbt: mean over requests of the time between two tokens.  held: adapters on a host, of all tables."""
    since_s = systems.load.since_s
    ttft_s = result.column("first_token_s", since_s) - result.column("arrival_s", since_s)
    tpot_s = result.column("tpot_s", since_s)
    held = result.held or [[len(systems.load.ranks)] * num_servers]
    return {
        "p95_ttft_s": percentile(ttft_s, 95) or 0.0,
        "mean_ttft_s": float(ttft_s.mean()),
        "mean_tbt_s": float(tpot_s.mean()),
        "p95_tbt_s": percentile(tpot_s, 95) or 0.0,
        "mean_held": float(np.mean(held)),
        "most_held": float(np.max(held)),
        "num_fetches": result.num_fetches,
    }
