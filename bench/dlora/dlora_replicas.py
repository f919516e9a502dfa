# SPDX-License-Identifier: Apache-2.0
"""Eight simulated replicas: round robin, proactive, proactive and migration, S-LoRA (figures 11 to 15)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from moe_lora.policies.migration.fast import plan_fast
from moe_lora.policies.migration.problem import MigrationPlan, MigrationProblem
from moe_lora.policies.routing.model_routing import CostModel, ShortestPendingTime
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.policies.routing.routing import Router
from moe_lora.provision.placement.burst_tolerance import DeviceMemory, place_and_preload
from moe_lora.sim.replicas import Replicas, ReplicasConfig, SimMigration

from .dlora_plan import (
    LORA_RANK,
    PAPER,
    TRUE_RANK,
    Machine,
    Work,
    caching,
    instance,
    names,
    popularity,
    requests,
)
from .dlora_simulated import SLO_S, latencies

NUM_REPLICAS = 8
SYSTEMS = ("round robin", "proactive", "proactive + migration")
WORK = Work(skewness=4, rate_per_s=20.0, duration_s=20.0, num_adapters=32, spread=1.0, max_tokens=4096)
RATES = (16.0, 24.0, 32.0, 40.0)
SCALES = (1.0, 1.5, 2.0, 3.0)
NUM_ADAPTERS = (1, 8, 32, 128)


class Clocked:
    """A planner, and its wall seconds (figure 15)."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, problem: MigrationProblem) -> MigrationPlan:
        begin = time.perf_counter()
        plan = plan_fast(problem)
        self.seconds.append(time.perf_counter() - begin)
        return plan


def replicas(
    system: str, work: Work, planner: Clocked, machine: Machine = PAPER, batching: str = "dlora"
) -> ReplicasConfig:
    """Adapters preloaded by burst tolerance, from the requests' mean loads."""
    one = instance(batching, machine, work.num_adapters)
    adapters = names(work.num_adapters)
    adapter_bytes = one.adapter_pages[adapters[0]] * one.page_bytes
    memory = DeviceMemory(
        free_bytes=dict.fromkeys(range(NUM_REPLICAS), float(one.num_device_pages * one.page_bytes)),
        adapter_bytes=dict.fromkeys(adapters, float(adapter_bytes)),
        request_bytes=work.scale * (work.mean_prompt + work.mean_answer) * one.time.kv_token_bytes,
    )
    ranks = dict.fromkeys(adapters, LORA_RANK)
    demand = dict(zip(adapters, popularity(work).probabilities, strict=True))
    table = place_and_preload(ranks, demand, memory)[0]
    cost = CostModel(
        steps=one.time.step_model(LORA_RANK, adapter_bytes),
        adapter_load_s_per_rank=adapter_bytes / one.link_bytes_per_s / LORA_RANK,
    )

    def router() -> Router:
        if system == "round robin":
            return PhiRouting(
                {name: [(int(str(server)), phi) for server, phi in row] for name, row in table.items()}
            )
        return ShortestPendingTime(cost, ranks, one.max_num_seqs)

    return ReplicasConfig(
        num_replicas=NUM_REPLICAS,
        instance=one,
        caching=caching(one),
        router=router,
        preloaded=[
            [name for name, row in table.items() if j in [server for server, _ in row]]
            for j in range(NUM_REPLICAS)
        ],
        migration=SimMigration(planner=planner, mean_answer_tokens=work.scale * work.mean_answer)
        if system.endswith("migration")
        else None,
    )


def figures(system: str, work: Work, **more: Any) -> dict[str, Any]:
    """Queueing: from arrival to the first step.  busy_share, memory_share: of each replica (figure 13).
    slo_share: requests with seconds per output token of at most SLO_S.  inference_share: computation without
    plans and swaps of weights, over computation and plans (figure 15).
    """
    planner = Clocked()
    found = Replicas(replicas(system, work, planner, **more), requests(work))
    end_s = max(request.finish_s for request in found.done)
    busy = np.array(found.busy_s) / end_s
    usage = [
        float(np.mean([look["device_kv_used"] + look["device_adapters"] for look in one.samples]))
        / (sum(one.cache.usage()[f"device_{part}"] for part in ("kv", "adapters", "free")))
        for one in found.instances
    ]
    swap_s = sum(one.weights.swap_s for one in found.instances if one.weights is not None)
    busy_s, plan_s = sum(found.busy_s), sum(planner.seconds)
    in_time = [one.finish_s - one.arrival_s <= SLO_S * len(one.planned.answer) for one in found.done]
    return latencies(found.done) | {
        "num_requests": len(found.done),
        "slo_share": float(np.mean(in_time)),
        "mean_queue_s": float(np.mean([request.queue_s for request in found.done])),
        "p99_queue_s": float(np.percentile([request.queue_s for request in found.done], 99)),
        "busy_share": busy.tolist(),
        "memory_share": usage,
        "num_moves": found.num_moves,
        "num_plans": found.num_plans,
        "plan_ms": {
            "median": float(np.median(planner.seconds)) * 1e3 if planner.seconds else None,
            "worst": max(planner.seconds, default=0.0) * 1e3,
        },
        "plan_share": plan_s / busy_s,
        "swap_share": swap_s / busy_s,
        "inference_share": (busy_s - swap_s) / (busy_s + plan_s),
        "preemptions": sum(one.scheduler.num_preemptions for one in found.instances),
    }


def replicas_points(
    record: Callable[[dict[str, Any], dict[str, Any]], Any], *, quick: bool, num_seeds: int
) -> None:
    """By rate (figures 11a, 13, 15), by length (11b), by number of adapters (12).

    S-LoRA (14): always unmerged, true-rank kernels, requests sent in turn.
    """
    base = replace(WORK, duration_s=6.0) if quick else WORK
    cells: list[tuple[str, Work, str, str]] = []
    cells += [("slora", replace(base, rate_per_s=rate), SYSTEMS[0], "unmerged") for rate in RATES]
    for system in SYSTEMS:
        cells += [("rate", replace(base, rate_per_s=rate), system, "dlora") for rate in RATES]
        cells += [("scale", replace(base, rate_per_s=16.0, scale=scale), system, "dlora") for scale in SCALES]
    for num in NUM_ADAPTERS:
        work = replace(base, num_adapters=num, skewness=max(1, 128 // num // 8))
        for system, batching in ((SYSTEMS[2], "dlora"), (SYSTEMS[2], "auto"), (SYSTEMS[0], "merged")):
            cells.append(("adapters", work, system, batching))
    if quick:
        cells = cells[::6]
    for part, work, system, batching in cells:
        machine = TRUE_RANK if part == "slora" else PAPER
        for seed in range(num_seeds):
            work = replace(work, seed=seed)
            config: dict[str, Any] = {
                "part": part,
                "system": system,
                "batching": batching,
                "work": asdict(work),
            }
            config |= {"num_replicas": NUM_REPLICAS, "slo_s": SLO_S, "machine": asdict(machine)}
            record(config, figures(system, work, machine=machine, batching=batching))
