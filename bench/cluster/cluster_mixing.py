# SPDX-License-Identifier: Apache-2.0
"""LoRAServe's figure 1: requests of rank 8 on one instance, alone and beside requests of rank 128."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from moe_lora.config.plan import WorkloadOptions
from moe_lora.report.latency import RequestRecord
from moe_lora.workload.popularity.named import LORA_RANKS
from moe_lora.workload.replay_plan import PlannedRequest, make_plan

from .cluster_fleet import Fleet
from .cluster_models import MachineModel
from .cluster_plan import PADDED, Plan, System
from .cluster_requests import lengths, mean_lengths
from .cluster_systems import run_system

PAPER_RATIO = 1.84
LOW, HIGH = LORA_RANKS[0], LORA_RANKS[-1]
LOAD = 0.15
"""Requests/s over an instance's capacity for rank 8 alone; for rank 128 the capacity is about a third."""
_SYSTEM = System(name="one instance", router="least_outstanding")


def run_mixing(
    plan: Plan,
    fleets: Mapping[str, Fleet],
    models: Mapping[str, MachineModel],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(config, result) per kernel.  Alone: every request has rank 8.  Beside: every second request has rank
    128, and the rest, the same as before, is judged.  Rounds and kernels in turn.
    """
    rate_per_s = LOAD * models[PADDED].points[LOW] / sum(mean_lengths(plan))
    times: dict[str, dict[bool, list[list[float]]]] = {kernel: {False: [], True: []} for kernel in fleets}
    for number in range(plan.mixing_rounds):
        alone = _requests(plan, rate_per_s, number)
        beside = _with_high(plan, alone)
        for kernel, fleet in fleets.items():
            for mixed in (False, True) if number % 2 else (True, False):
                outcome = run_system(fleet, _SYSTEM, beside if mixed else alone, num_instances=1)
                times[kernel][mixed].append(_ttft_ms(outcome.records[::2]))
    for kernel, found in times.items():
        yield (
            {"section": "figure 1", "kernel": kernel, "rate_per_s": rate_per_s, "load": LOAD},
            _result(found),
        )


def _requests(plan: Plan, rate_per_s: float, seed: int) -> list[PlannedRequest]:
    """Poisson, of rank 8's adapters in turn."""
    options = WorkloadOptions(
        arrivals="gamma", request_rate_per_s=rate_per_s, duration_s=plan.mixing_s, seed=seed
    )
    names = _of_rank(plan, LOW)
    return [
        replace(one, adapter=names[i // 2 % len(names)])
        for i, one in enumerate(make_plan(lengths(plan), options))
    ]


def _with_high(plan: Plan, requests: list[PlannedRequest]) -> list[PlannedRequest]:
    names = _of_rank(plan, HIGH)
    return [
        replace(one, adapter=names[i // 2 % len(names)]) if i % 2 else one for i, one in enumerate(requests)
    ]


def _of_rank(plan: Plan, rank: int) -> list[str]:
    return [name for name, own in plan.lora_ranks.items() if own == rank]


def _ttft_ms(records: list[RequestRecord]) -> list[float]:
    return [one.timing.ttft_ms for one in records if one.timing is not None]


def _result(found: Mapping[bool, list[list[float]]]) -> dict[str, Any]:
    """P95 over all rounds together, and the ratio round by round."""
    alone, beside = (_p95(list(chain.from_iterable(found[mixed]))) for mixed in (False, True))
    return {
        "p95_ttft_ms_alone": alone,
        "p95_ttft_ms_beside": beside,
        "ratio": beside / alone,
        "ratio_rounds": [_p95(high) / _p95(low) for low, high in zip(found[False], found[True], strict=True)],
        "num_judged": sum(map(len, found[False])),
        "paper_ratio": PAPER_RATIO,
    }


def _p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))
