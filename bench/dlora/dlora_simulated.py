# SPDX-License-Identifier: Apache-2.0
"""One simulated replica under each merging policy: figures 10, 14 and 15."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bench.sim.cached_runs import simulate_cached
from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.sim.instance import CachedInstance
from moe_lora.sim.requests import CachedRequest

from .dlora_plan import (
    MACHINES,
    SKEWNESS,
    SLO_S,
    TRUE_RANK,
    Machine,
    Work,
    caching,
    instance,
    largest_share,
    requests,
    seeds,
)

SYSTEMS = ("unmerged", "merged", "dlora", "auto")
NUM_SEEDS = 3
DURATION_S = 180.0
SHARES = (0.8, 0.389, 0.2, 0.1, 0.05, 0.02)
"""Of deltas in a step: the artifact's, the paper's, down to true-rank kernels."""

# One run.


def simulate(
    system: str, machine: Machine, work: Work, settings: DLoraConfig | None = None
) -> CachedInstance:
    config = instance(system, machine, work.num_adapters, settings)
    return simulate_cached(config, caching(config)(), requests(work))


def latencies(done: Sequence[CachedRequest]) -> dict[str, float]:
    """average_s: seconds of all requests over their output tokens, as in the paper; p90_s, worst_s: of single
    requests.  worst_ttft_s: the starvation tail.
    """
    seconds = np.array([request.finish_s - request.arrival_s for request in done])
    tokens = np.array([len(request.planned.answer) for request in done])
    ttft_s = [request.ttft_s for request in done]
    return {
        "average_s": float(seconds.sum() / tokens.sum()),
        "p90_s": float(np.percentile(seconds / tokens, 90)),
        "worst_s": float((seconds / tokens).max()),
        "p99_ttft_s": float(np.percentile(ttft_s, 99)),
        "worst_ttft_s": max(ttft_s),
        "tokens_per_s": float(tokens.sum() / max(request.finish_s for request in done)),
    }


def figures(found: CachedInstance) -> dict[str, Any]:
    """Of a run: latencies, steps by mode, merges, and the share of swaps in the time computed (figure 15)."""
    assert found.weights is not None
    return latencies(found.done) | {
        "num_requests": len(found.done),
        "num_steps": dict(found.weights.num_steps),
        "num_merges": found.weights.num_merges,
        "swap_share": found.weights.swap_s / found.busy_s,
    }


def mean_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and the worst of the latencies."""
    numbers = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
    found: dict[str, Any] = {key: float(np.mean([run[key] for run in runs])) for key in numbers}
    modes = sorted({mode for run in runs for mode in run["num_steps"]})
    found["num_steps"] = {
        mode: float(np.mean([run["num_steps"].get(mode, 0) for run in runs])) for mode in modes
    }
    return found | {"worst_seed_average_s": max(run["average_s"] for run in runs)}


def of_seeds(
    system: str, machine: Machine, works: Iterable[Work], settings: DLoraConfig | None = None
) -> dict[str, Any]:
    return mean_figures([figures(simulate(system, machine, work, settings)) for work in works])


def rate_at_slo(machine: Machine, work: Work, system: str = "dlora") -> float:
    """Requests/s at which the system's average latency is SLO_S, as the paper sets its load (7.3)."""
    low, high = 0.5, 32.0
    for _ in range(7):
        middle = math.sqrt(low * high)
        found = figures(simulate(system, machine, replace(work, rate_per_s=middle)))
        low, high = (middle, high) if found["average_s"] < SLO_S else (low, middle)
    return math.sqrt(low * high)


# Figures 10, 14 and 15.


def batching_points(
    record: Callable[[dict[str, Any], dict[str, Any]], Any],
    *,
    duration_s: float,
    num_seeds: int,
    machines: Iterable[str] = tuple(MACHINES),
) -> None:
    """Every policy at every skewness on these machines, at the load of an average dLoRA latency at the SLO
    (in the middle of the skews), and at half of it.
    """
    for machine in map(MACHINES.__getitem__, machines):
        base = Work(skewness=SKEWNESS[1], rate_per_s=1.0, duration_s=duration_s)
        at_slo = rate_at_slo(machine, base)
        for load, skewness in ((load, s) for load in (1.0, 0.5) for s in (0, *SKEWNESS, math.inf)):
            work = replace(base, skewness=skewness, rate_per_s=load * at_slo)
            for system in SYSTEMS:
                _record(record, "batching", system, machine, work, num_seeds, load=load)
        # S-LoRA: always unmerged, true-rank kernels (figure 14).
        if machine is not TRUE_RANK:
            for skewness in SKEWNESS:
                work = replace(base, skewness=skewness, rate_per_s=at_slo)
                _record(record, "slora", "unmerged", TRUE_RANK, work, num_seeds, load=1.0)


def _record(
    record: Callable[[dict[str, Any], dict[str, Any]], Any],
    part: str,
    system: str,
    machine: Machine,
    work: Work,
    num_seeds: int,
    **more: Any,
) -> None:
    config = {"part": part, "system": system, "machine": asdict(machine), "work": asdict(work)} | more
    if system == "dlora":
        config["settings"] = asdict(DLoraConfig())
    config["largest_share"] = largest_share(work)
    config["num_seeds"] = num_seeds
    config["work"]["skewness"] = str(work.skewness)
    record(config, of_seeds(system, machine, seeds(work, num_seeds)))


def worth_points(
    record: Callable[[dict[str, Any], dict[str, Any]], Any],
    *,
    duration_s: float,
    num_seeds: int,
    shares: Iterable[float] = SHARES,
) -> None:
    """Least skewness at which merging pays, by the share of deltas in a step."""
    for share in shares:
        machine = replace(TRUE_RANK, name=f"deltas {share:g}", delta_share=share)
        for skewness in (0, *SKEWNESS, math.inf):
            work = Work(skewness=skewness, rate_per_s=4.0, duration_s=duration_s)
            for system in ("unmerged", "dlora", "auto"):
                _record(record, "worth", system, machine, work, num_seeds)
