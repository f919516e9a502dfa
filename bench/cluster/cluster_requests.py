# SPDX-License-Identifier: Apache-2.0
"""The requests of bench_cluster's cells, equal for every system and kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_lora.config.plan import WorkloadOptions
from moe_lora.workload.replay_plan import PlannedRequest, make_plan
from moe_lora.workload.traces.records import Trace, TraceRequest

from .cluster_plan import TRACES, Plan


def lengths(plan: Plan, num_requests: int = 4096) -> Trace:
    """Prompts log-normal (sigma 0.5), answers geometric, both cut: LoRAServe's Azure traces scaled down."""
    rng = np.random.default_rng(11)
    prompts = rng.lognormal(np.log(plan.median_prompt_tokens), 0.5, num_requests)
    answers = 1 + rng.geometric(1 / plan.mean_output_tokens, num_requests)
    rows = zip(
        np.clip(prompts, 4, plan.max_prompt_tokens).astype(int).tolist(),
        np.clip(answers, 2, plan.max_output_tokens).tolist(),
        strict=True,
    )
    requests = tuple(TraceRequest(0.0, prompt, answer) for prompt, answer in rows)
    return Trace("drawn", "drawn", requests, has_arrival_times=False)


def requests_of(plan: Plan, trace: str, rate_per_s: float, duration_s: float) -> list[PlannedRequest]:
    """Equal for every system and kernel."""
    options = WorkloadOptions(
        arrivals="gamma", request_rate_per_s=rate_per_s, burstiness=TRACES[trace][1], duration_s=duration_s
    )
    return make_plan(lengths(plan), options, plan.popularity(trace))


def demand_at_start(plan: Plan, trace: str, requests: Sequence[PlannedRequest]) -> dict[str, float]:
    """Adapter -> tokens/s implied by the trace's initial popularity."""
    tokens_per_s = sum(one.prompt_tokens + one.output_tokens for one in requests) / plan.duration_s
    popularity = plan.popularity(trace).at(0.0)
    pairs = zip(popularity.adapters, popularity.probabilities, strict=True)
    return {name: share * tokens_per_s for name, share in pairs}


def mean_lengths(plan: Plan) -> tuple[float, float]:
    """Tokens of a prompt and of an answer."""
    requests = lengths(plan).requests
    prompts = sum(one.prompt_tokens for one in requests) / len(requests)
    return prompts, sum(one.output_tokens for one in requests) / len(requests)
