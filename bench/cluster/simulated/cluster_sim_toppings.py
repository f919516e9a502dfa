# SPDX-License-Identifier: Apache-2.0
"""Toppings' simulation of 60 servers (section 7.4): requests within their SLO, by router."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from moe_lora.policies.routing.routing import Instance, RoutedView, Router
from moe_lora.provision.operating_points import PointLoad, SloGoal
from moe_lora.provision.placement.placement import PLACEMENTS
from moe_lora.provision.replayed.system import System
from moe_lora.provision.replayed.system import simulate as run_system
from moe_lora.provision.replayed.system_config import SystemConfig
from moe_lora.timing.step_model import Row
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.replay_plan import PlannedRequest

from .cluster_sim_plan import Load, Systems, simulated_points, step_models

NUM_SERVERS, NUM_ADAPTERS = 60, 40_000
RATES_PER_S = (280.0, 340.0)
"""The paper's is the second; with the lengths and times assumed here it is more than the servers can do
with padded ranks mixed.
"""
RANKS = (8, 16, 32, 64)
"""Four, as in the paper; values from its figure 11."""
ZIPF_S = 1.0
"""Assumed: the functions' invocations are in a figure only."""
PROMPT_TOKENS, OUTPUT_TOKENS = 70, 215
"""Means of LMSYS-Chat-1M; lengths are geometric."""
NUM_MODULES = 3
"""Q, K and V."""
SLO_FACTOR = 1.5
ROUTERS = ("rank_aware", "shortest_pending_time", "random", "first_fit", "least_outstanding")
PLACED = ("loraserve", "optimal")
Rows = Iterator[tuple[dict[str, Any], dict[str, Any]]]


def toppings_cells(*, quick: bool) -> Iterator[tuple[dict[str, Any], Callable[[], Rows]]]:
    """(name, runner)."""
    rates = {"padded": RATES_PER_S, "true_rank": RATES_PER_S, "roofline": RATES_PER_S[-1:]}
    for model, of_model in ({"padded": RATES_PER_S[:1]} if quick else rates).items():
        for rate in of_model:
            yield (
                {"study": "toppings", "model": model, "rate_per_s": rate},
                partial(toppings, model, rate, 6.0 if quick else 45.0),
            )


def toppings(model: str, rate_per_s: float, length_s: float) -> Rows:
    """Every router and placement on the same requests, judged by those without LoRA."""
    load = toppings_load(length_s)
    plan = load.plan(rate_per_s)
    base = _without_lora(load, plan)
    base_tpt_s = _tpt_s(base)
    mean_base_s = float(np.mean([base_tpt_s[i] for i in _judged_ids(plan, load)]))
    systems = _systems(model, load, SLO_FACTOR * mean_base_s)
    for name in (*ROUTERS, *PLACED):
        clocks = _Clocks()
        if name in PLACED:
            place = clocks.placing(PLACEMENTS[name])
            config = systems.placed(place, NUM_SERVERS, rate_per_s)
        else:
            config = systems.routed(name, NUM_SERVERS)
        result = run_system(clocks.routing(config), plan)
        yield (
            {"num_servers": NUM_SERVERS, "num_adapters": NUM_ADAPTERS, "system": name},
            _judged(result, plan, load, base_tpt_s)
            | {"mean_tpt_without_lora_s": mean_base_s}
            | clocks.found(),
        )


def toppings_load(length_s: float) -> Load:
    names = [f"f{index:05}" for index in range(NUM_ADAPTERS)]
    drawn = np.random.default_rng(3).choice(RANKS, NUM_ADAPTERS)

    def lengths(count: int, rng: np.random.Generator) -> tuple[Sequence[int], Sequence[int]]:
        prompts, answers = rng.geometric(1 / PROMPT_TOKENS, count), rng.geometric(1 / OUTPUT_TOKENS, count)
        return prompts.tolist(), answers.tolist()

    return Load(
        popularity=zipf(names, ZIPF_S),
        ranks=dict(zip(names, drawn.tolist(), strict=True)),
        lengths=lengths,
        tokens_per_request=PROMPT_TOKENS + OUTPUT_TOKENS,
        num_modules=NUM_MODULES,
        duration_s=length_s,
        since_s=length_s / 3,
    )


def _systems(model: str, load: Load, slo_tpt_s: float) -> Systems:
    """slo_tpt_s: for operating points.  The router's limit is of a decode step, as `bench_cluster`'s."""
    steps = step_models(NUM_MODULES)[model]
    one = PointLoad(
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        num_adapters=64,
        num_requests=200,
        duration_s=60.0,
    )
    points = simulated_points(steps, RANKS, one, SloGoal(ttft_s=10.0, tpot_s=slo_tpt_s))
    return Systems(
        load=load,
        model=steps,
        points=points,
        mean_output_tokens=OUTPUT_TOKENS,
        slo_tpot_s=SLO_FACTOR * steps.decode_step_s([Row(None, 0)]),
    )


def _without_lora(load: Load, plan: Sequence[PlannedRequest]) -> System:
    """The same requests to the base model, routed to the least token work."""
    systems = Systems(
        load=load, model=step_models(NUM_MODULES)["padded"], points={}, mean_output_tokens=OUTPUT_TOKENS
    )
    return run_system(
        systems.routed("least_outstanding", NUM_SERVERS), [replace(one, adapter=None) for one in plan]
    )


def _judged_ids(plan: Sequence[PlannedRequest], load: Load) -> list[int]:
    """The middle requests: servers are full, and others still come."""
    return [one.index for one in plan if one.arrival_s >= load.since_s]


def _tpt_s(result: System) -> dict[int, float]:
    """Time per token, queue and prefill included (Toppings section 7.1), by request."""
    return {one.index: (one.finish_s - one.arrival_s) / one.output_tokens for one in result.requests}


def _judged(
    result: System, plan: Sequence[PlannedRequest], load: Load, base_tpt_s: Mapping[int, float]
) -> dict[str, Any]:
    """slo_attainment: requests with a time per token of at most 1.5 times their own without LoRA;
    slo_attainment_of_mean: at most 1.5 times the mean.
    """
    ids = _judged_ids(plan, load)
    found = _tpt_s(result)
    tpt_s, base_s = np.array([found[i] for i in ids]), np.array([base_tpt_s[i] for i in ids])
    tpot_s = result.column("tpot_s", load.since_s)
    ttft_s = result.column("first_token_s", load.since_s) - result.column("arrival_s", load.since_s)
    return {
        "slo_attainment": float(np.mean(tpt_s <= SLO_FACTOR * base_s)),
        "slo_attainment_of_mean": float(np.mean(tpt_s <= SLO_FACTOR * base_s.mean())),
        "mean_tpt_s": float(tpt_s.mean()),
        "mean_tpot_s": float(np.nanmean(tpot_s)),
        "p95_ttft_s": float(np.percentile(ttft_s, 95)),
        "num_loads": result.num_loads,
        "num_fetches": result.num_fetches,
        "mean_held": float(np.mean(result.held)) if result.held else float(NUM_ADAPTERS),
        "most_held": float(np.max(result.held)) if result.held else float(NUM_ADAPTERS),
    }


@dataclass
class _Clocks:
    """Processor time of decisions and of placements."""

    decisions_s: float = 0.0
    num_decisions: int = 0
    placements_s: list[float] = field(default_factory=list)

    def routing(self, config: SystemConfig) -> SystemConfig:
        """The system with timed router decisions, except for a router with placements."""
        if config.placement is not None:
            return config
        return replace(config, router=lambda: _TimedRouter(config.router(), self))

    def placing(self, place: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin_s = time.process_time()
            table = place(*arguments)
            self.placements_s.append(time.process_time() - begin_s)
            return table

        return timed

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.num_decisions:
            found["decisions_per_cpu_s"] = self.num_decisions / max(self.decisions_s, 1e-9)
        if self.placements_s:
            found["placement_cpu_s"] = max(self.placements_s)
        return found


class _TimedRouter:
    def __init__(self, router: Router, clocks: _Clocks) -> None:
        self._router, self._clocks = router, clocks

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        begin_s = time.process_time()
        chosen = self._router.choose(request, instances)
        self._clocks.decisions_s += time.process_time() - begin_s
        self._clocks.num_decisions += 1
        return chosen
