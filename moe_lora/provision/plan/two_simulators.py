# SPDX-License-Identifier: Apache-2.0
"""An accepted plan on both simulators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from moe_lora.config.engine import CACHE_POLICIES
from moe_lora.core.shape import ModelShape
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    SimLoraServerConfig,
    StatedHits,
    SystemConfig,
)
from moe_lora.sim.instance import CachedConfig
from moe_lora.sim.lora_server import SimServerConfig
from moe_lora.sim.replicas import Replicas, ReplicasConfig
from moe_lora.sim.requests import CachedRequest, StepCounts
from moe_lora.timing.host_times import LinkTime
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.replay_plan import PlannedRequest, TurnRequest
from moe_lora.workload.statistics import mean, percentile
from moe_lora.workload.traces.records import HASH_BLOCK_TOKENS, Trace

from . import verify
from .cluster_size import Cluster
from .inputs import CHUNK_TOKENS, PlanInputs, SizedCluster
from .memory import BLOCK_TOKENS, base_parameters
from .verify import WARM_UP_SHARE, planned_load, system_of, under_way

FAST, REAL = "provision.replayed", "moe_lora.sim"
NUM_REQUESTS, LEAST_REQUESTS = 2000, 200
"""Per comparison; moe_lora.sim takes milliseconds a request."""
MOST_TOKENS = 400_000
"""Output tokens per comparison; PROMPT_TOKENS of a prompt count as one."""
PROMPT_TOKENS = 64
"""Tokens of a KV page: the engine's default."""
NOT_REPLAYED = (
    "messages between processes, lost processes, experts of unequal load, turns of instances at each layer "
    "of the LoRA Server, its rows on the links of KV, adapters of other than the mean size, early holds that "
    "give way, and second trials of failed moves"
)


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Judged requests on a simulator; None without requests."""

    simulator: str
    num_requests: int
    p50_ttft_s: float | None
    p95_ttft_s: float | None
    p99_ttft_s: float | None
    mean_tpot_s: float | None
    p95_tpot_s: float | None
    in_slo: float | None
    """Share within TTFT and TPOT."""
    prefix_hits: float | None
    """Share of prompt tokens."""


def num_replayed(inputs: PlanInputs) -> int:
    """Requests of a comparison: at most NUM_REQUESTS, with about MOST_TOKENS."""
    tokens = inputs.output_tokens
    if inputs.prompts is not None:
        tokens += inputs.prompts.prompt_tokens / PROMPT_TOKENS
    return max(LEAST_REQUESTS, min(NUM_REQUESTS, verify.NUM_REQUESTS, int(MOST_TOKENS / tokens)))


class _Judged(NamedTuple):
    """A judged request."""

    ttft_s: float
    tpot_s: float
    """NaN for a single token."""
    prompt_tokens: int
    num_cached: int
    """Prompt tokens of a prefix hit."""


def both(
    inputs: PlanInputs,
    place: SizedCluster,
    rate_per_s: float,
    trace: Trace,
    *,
    num_requests: int,
    seed: int,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> list[Latencies]:
    """Latencies of FAST and of REAL under Poisson arrivals.

    show: called with requests done on REAL, and in all.  Raises CapacityError if a request has no room.
    """
    cluster = Cluster(inputs)
    load = planned_load(inputs, rate_per_s, trace, num_requests=num_requests, seed=seed)
    requests = load.requests["poisson"]
    system = system_of(cluster, place, load.popular)
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    since_s = first_s + WARM_UP_SHARE * (last_s - first_s)
    asked = [*under_way(cluster, place, load, requests, system.instance.max_num_seqs), *requests]
    fast = [
        _Judged(one.ttft_s, one.tpot_s, one.prompt_tokens, one.num_cached)
        for one in simulate(system, asked).requests
        if one.arrival_s >= since_s
    ]
    real = _real(system, inputs.shape, asked, since_s, show)
    return [_latencies(FAST, inputs, fast), _latencies(REAL, inputs, real)]


def _latencies(simulator: str, inputs: PlanInputs, judged: list[_Judged]) -> Latencies:
    ttft_s, tpot_s, prompt_tokens, num_cached = np.array(judged, dtype=np.float64).reshape(-1, 4).T
    in_slo = (ttft_s <= inputs.slo_ttft_s) & ~(tpot_s > inputs.slo_tpot_s)
    tpot_s = tpot_s[~np.isnan(tpot_s)]
    return Latencies(
        simulator=simulator,
        num_requests=len(ttft_s),
        p50_ttft_s=percentile(ttft_s, 50),
        p95_ttft_s=percentile(ttft_s, 95),
        p99_ttft_s=percentile(ttft_s, 99),
        mean_tpot_s=mean(tpot_s),
        p95_tpot_s=percentile(tpot_s, 95),
        in_slo=mean(in_slo.astype(np.float64)),
        prefix_hits=float(num_cached.sum() / prompt_tokens.sum()) if judged else None,
    )


def _real(
    system: SystemConfig,
    shape: ModelShape,
    requests: Sequence[PlannedRequest],
    since_s: float,
    show: Callable[[int, int], None],
) -> list[_Judged]:
    """Requests judged on REAL; arrivals start after the first adapters' load."""
    config = _replicas(system, shape, {one.adapter for one in requests if one.adapter is not None})
    local = system.adapters if system.prompts is None else system.prompts.adapters
    begin_s = len(local.prefetched) * _load_s(system, local) if config.preloaded else 0.0
    found: list[_Judged] = []
    num_done = 0

    def finish(request: CachedRequest) -> None:
        nonlocal num_done
        num_done += 1
        if request.arrival_s >= begin_s + since_s:
            num_tokens = len(request.planned.prompt)
            found.append(_Judged(request.ttft_s, request.tpot_s, num_tokens, request.num_cached))
        show(num_done, len(requests))

    Replicas(config, _turns(requests, system, begin_s), finish)
    return found


def _load_s(system: SystemConfig, adapters: LocalConfig) -> float:
    """Of an adapter."""
    assert isinstance(system.adapter_bytes, float)
    return LinkTime(adapters.load_bytes_per_s).seconds(system.adapter_bytes)


def _replicas(system: SystemConfig, shape: ModelShape, names: set[str]) -> ReplicasConfig:
    adapters, instance, prompts = system.adapters, system.instance, system.prompts
    server: SimServerConfig | None = None
    if isinstance(adapters, SimLoraServerConfig):
        server = _server(adapters, instance.num_layers, _load_s(system, adapters))
    config = _cached(system, instance, adapters, shape, names)
    local = None if prompts is None else _cached(system, prompts.instance, prompts.adapters, shape, names)
    preloaded: list[Sequence[str]] = [adapters.prefetched] * system.num_instances if server is None else []
    if prompts is not None and system.prefill is not None:
        number = system.prefill.num_instances
        preloaded = [prompts.adapters.prefetched] * number + [()] * (system.num_instances - number)
    return ReplicasConfig(
        num_replicas=system.num_instances,
        instance=config,
        caching=lambda: make_caching_policy(CACHE_POLICIES[0], config.costs()),
        router=system.router,
        preloaded=preloaded,
        server=server,
        prefill=system.prefill,
        prompts=local,
    )


def _cached(
    system: SystemConfig, instance: InstanceConfig, adapters: LocalConfig, shape: ModelShape, names: set[str]
) -> CachedConfig:
    """An instance with these adapters beside the weights, or at a LoRA Server."""
    is_local = not isinstance(adapters, SimLoraServerConfig)
    page_bytes = BLOCK_TOKENS * shape.kv_bytes_per_token()
    assert isinstance(system.adapter_bytes, float)
    assert instance.layers is not None
    pages = math.ceil(system.adapter_bytes / page_bytes) if is_local else 0
    kv_pages = int((instance.kv_tokens or 0.0) // BLOCK_TOKENS)
    return CachedConfig(
        time=_weighed(instance, shape),
        adapter_pages=dict.fromkeys([*adapters.prefetched, *sorted(names - set(adapters.prefetched))], pages),
        num_device_pages=kv_pages + adapters.capacity * pages,
        num_host_pages=0,
        link_bytes_per_s=adapters.load_bytes_per_s,
        block_size=BLOCK_TOKENS,
        max_num_seqs=instance.max_num_seqs,
        max_num_batched_tokens=instance.max_num_batched_tokens,
        starvation_s=adapters.starvation_s,
        max_kv_pages=kv_pages,
        max_adapters=adapters.capacity if is_local else None,
        layers=instance.layers.layer_s,
        num_layers=instance.num_layers,
    )


def _server(adapters: SimLoraServerConfig, num_layers: int, load_s: float) -> SimServerConfig:
    return SimServerConfig(
        capacity=adapters.capacity,
        num_layers=num_layers,
        layer_load_s=load_s / math.ceil(num_layers / adapters.num_stages),
        num_stages=adapters.num_stages,
        control_s=adapters.control_s,
        starvation_s=adapters.starvation_s,
        prefetched=adapters.prefetched,
    )


def _weighed(instance: InstanceConfig, shape: ModelShape) -> TransformerTime:
    """Costs for the cache's policy: a prompt chunk, a decode row."""
    assert instance.layers is not None
    chunk = StepCounts(num_prompts=1, num_prompt_tokens=CHUNK_TOKENS)
    chunk_s, row_s = (
        instance.num_layers * instance.layers.layer_s(step)[0] for step in (chunk, StepCounts(num_rows=1))
    )
    num_params = base_parameters(shape)
    return TransformerTime(
        num_params=num_params,
        num_layers=instance.num_layers,
        hidden_size=shape.hidden_size,
        kv_token_bytes=shape.kv_bytes_per_token(),
        flops_per_s=2.0 * num_params * CHUNK_TOKENS / chunk_s,
        bytes_per_s=math.inf,
        fixed_s=row_s,
    )


def _turns(requests: Sequence[PlannedRequest], system: SystemConfig, begin_s: float) -> Iterator[TurnRequest]:
    """Requests with token ids, equal for blocks of equal hash and the stated share."""
    make_hits = (system.prompts or system).instance.prefix_hits
    hits = None if make_hits is None else make_hits()
    share = hits.share if isinstance(hits, StatedHits) else 0.0
    fresh = iter(range(-1, -(10**15), -1))
    for one in requests:
        blocks = (range(block * HASH_BLOCK_TOKENS, (block + 1) * HASH_BLOCK_TOKENS) for block in one.hash_ids)
        stated = range(int(share * one.prompt_tokens))
        prompt = islice(chain(stated, *blocks, fresh), max(1, one.prompt_tokens))
        yield TurnRequest(
            index=one.index,
            arrival_s=begin_s + one.arrival_s,
            adapter=one.adapter,
            prompt=tuple(prompt),
            answer=tuple(islice(fresh, one.output_tokens)),
        )
