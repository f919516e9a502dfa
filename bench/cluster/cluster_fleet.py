# SPDX-License-Identifier: Apache-2.0
"""The engine processes of `bench_cluster`, shared by all systems in sequence."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.processes import instance_processes
from moe_lora.config import EngineConfig
from moe_lora.core.clock import WallClock
from moe_lora.core.request import EngineStats, GenerateRequest, SamplingParams
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.engine.client.client import EngineClient

from .cluster_models import Files
from .cluster_plan import Plan

_IDLE_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Instances of one kernel.  points: the placements' file."""

    plan: Plan
    kernel: str
    clients: Sequence[EngineClient]
    files: Files
    points: Path

    def instance_registry(self, num_instances: int | None = None) -> InstanceRegistry:
        """A new registry for each system: routers start without knowledge."""
        return InstanceRegistry(self.clients[:num_instances], self.files.adapters)


@contextmanager
def started(plan: Plan, kernel: str, files: Files, points: Path) -> Iterator[Fleet]:
    """The processes, a thread each, ended with the context."""
    config = EngineConfig(
        model_dir=str(files.model_dir),
        adapters=files.adapters,
        device="cpu",
        dtype="float32",
        eager=True,
        lora_kernel=kernel,
        arena_mb=plan.arena_mb,
        max_loras=plan.num_adapters,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_prompt_tokens + plan.max_output_tokens,
        prefix_caching=False,
        num_threads=1,
        num_instances=plan.num_instances,
        spare_process=False,
    )
    with instance_processes(config) as clients:
        yield Fleet(plan=plan, kernel=kernel, clients=clients, files=files, points=points)


async def idle(clients: Sequence[EngineClient]) -> list[EngineStats]:
    """Stats at rest: abandoned requests may remain for a moment."""
    while True:
        stats = await asyncio.gather(*(client.stats() for client in clients))
        if not any(one.num_running + one.num_waiting for one in stats):
            return list(stats)
        await asyncio.sleep(_IDLE_POLL_S)


@dataclass(frozen=True, kw_only=True)
class Unloaded:
    """Medians, one request at a time.  load_s_per_rank: load time of an adapter of
    highest rank, over the rank.
    """

    ttft_s: float
    no_lora_ttft_s: float
    load_s_per_rank: float


def unloaded(fleet: Fleet, num_requests: int = 7) -> Unloaded:
    """Call each instance once per adapter, then the first one with single requests."""
    return asyncio.run(_unloaded(fleet, num_requests))


async def _unloaded(fleet: Fleet, num_requests: int) -> Unloaded:
    ranks = fleet.plan.lora_ranks
    highest = max(ranks, key=lambda name: ranks[name])
    for client in fleet.clients:
        cold = {name: await _single(client, fleet.plan, name, 0) for name in ranks}
    load_s = statistics.median(load for name, (_, load) in cold.items() if ranks[name] == ranks[highest])
    warm = [await _single(fleet.clients[0], fleet.plan, highest, i) for i in range(1, num_requests + 1)]
    bare = [await _single(fleet.clients[0], fleet.plan, None, i) for i in range(1, num_requests + 1)]
    return Unloaded(
        ttft_s=statistics.median(ttft for ttft, _ in warm),
        no_lora_ttft_s=statistics.median(ttft for ttft, _ in bare),
        load_s_per_rank=load_s / ranks[highest],
    )


async def _single(client: EngineClient, plan: Plan, adapter: str | None, number: int) -> tuple[float, float]:
    """TTFT and its part for the adapter's load, in seconds."""
    vocab = plan.size.vocab_size
    prompt = tuple((7919 * number + 31 * i) % vocab for i in range(plan.median_prompt_tokens))
    request = GenerateRequest(
        request_id=f"single-{adapter}-{number}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )
    clock = WallClock()
    sent_s, found = clock.now_s(), (0.0, 0.0)
    async for output in client.generate(request):
        if output.timing is not None:
            found = (clock.now_s() - sent_s, output.timing.adapter_load_s)
    return found
