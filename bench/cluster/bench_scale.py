# SPDX-License-Identifier: Apache-2.0
"""A cluster of 256 instances and 100,000 adapters: decisions of routers, and changes at all front ends.

    python -m bench.cluster.bench_scale --out bench/results/scale.jsonl   # 5 minutes

Real: routers, the registry of instances, the controller with its states, and two front ends in a process of
their own, over a socket.  Stand-ins: the instances, which answer a load at once, without a message.  Expected
before the first run: a decision in 50 us at P50 (256 attributes at 0.1 us, read twice); a change in 1 kB and
50 ms, the same for 1,000 and 100,000 adapters; the idle controller compares four tables of all adapters five
times a second, in 10 % of a core.  Expected later: 1.3 ms by rank_aware, 0.3 ms by shortest_pending_time (256
costs at 5 and 1 us).
With facts of instances in columns, expected before the run: rank_aware 30 and shortest_pending_time 10
operations on 256 numbers at 0.6 us, 10 us for the candidates, 4 us for each exact cost.  With changed loads
counted at the choice: 25 us more for each changed load, two or three of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.harness.records import Recorder
from moe_lora.config import ROUTINGS, EngineConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import Address
from moe_lora.core.clock import WallClock
from moe_lora.core.request import AdapterInfo, GenerateRequest, SamplingParams
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.cluster_controller import ClusterController, ControlledFleet
from moe_lora.dist.cluster.controller.cluster_state import ClusterStateLog
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.front_end_listener import FrontEndListener
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.listener import CatchUp
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.net.codec import encode
from moe_lora.policies.routing.model_routing import CostModel
from moe_lora.policies.routing.routers import RoutingContext, make_router
from moe_lora.timing.step_model import StepModel

NUM_INSTANCES = 256
NUM_ADAPTERS = (1_000, 100_000)
FRONT_ENDS = ("one", "two")
GOALS = {"decision_us": 50, "change_s": 1.0, "controller_cores": 1.0, "controller_gb": 2.0}


class StandIn:
    """An instance that answers a load at once."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def call(self, verb: str, name: str, path: str, **words: Any) -> AdapterInfo:
        facts: dict[str, Any] = {"lora_rank": 8, "nbytes": 1, "targets": (), "residency": "host"}
        return AdapterInfo(name=name, version=words["version"], path=path, content_hash="0" * 64, **facts)

    async def is_alive(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing to end."""


def registry_of(num_adapters: int) -> InstanceRegistry:
    adapters = [(f"adapter-{number}", f"/adapters/{number}") for number in range(num_adapters)]
    clients: list[Any] = [StandIn() for _ in range(NUM_INSTANCES)]
    return InstanceRegistry(clients, adapters)


def cluster() -> ClusterConfig:
    return ClusterConfig(engine=EngineConfig(model_dir="base"), served_model_name="base")


def decisions(name: str, num_adapters: int, num_requests: int) -> dict[str, float]:
    """CPU microseconds of a choice, with Zipf-like adapters; the earliest half of the requests has ended.

    Cores: choices, and the requests' starts and ends in the counts of instances.
    """
    registry, rng = registry_of(num_adapters), random.Random(0)
    seconds = {"step": 5e-3, "tokens": 1e-4, "experts": 4e-3, "padded_ranks": 1e-6, "expert_ranks": 1e-6}
    steps = StepModel(kernel="bgmv", form="full", expert_share=0.25, decode_s=seconds, prefill_s=seconds)
    ranks = {f"adapter-{number}": 8 << number % 4 for number in range(num_adapters)}
    table = {
        f"adapter-{number}": [(number % NUM_INSTANCES, 0.5), ((number + 1) % NUM_INSTANCES, 0.5)]
        for number in range(num_adapters)
    }
    model = CostModel(steps=steps, slo_tpot_s=0.2)
    router = make_router(name, RoutingContext(model=model, ranks=ranks, table=table if name == "phi" else {}))
    taken, counted, running = [], [], []
    for number in range(num_requests):
        adapter = f"adapter-{int(rng.paretovariate(1.0)) % num_adapters}"
        request = GenerateRequest(
            request_id=str(number), prompt_token_ids=(1,) * 100, sampling=SamplingParams(), adapter=adapter
        )
        begin = time.thread_time()
        chosen: Any = router.choose(request, registry.candidates(adapter))
        taken.append(time.thread_time() - begin)
        begin = time.thread_time()
        chosen.load.add(adapter, 100)
        chosen.outstanding_tokens += 228
        running.append((chosen, adapter))
        if number % 2:
            ended, adapter = running.pop(0)
            ended.load.end(adapter, 100, started=False)
            ended.outstanding_tokens -= 228
        counted.append(time.thread_time() - begin)
    taken.sort()
    return {
        "p50_us": 1e6 * statistics.median(taken),
        "p99_us": 1e6 * taken[len(taken) * 99 // 100],
        "counts_us": 1e6 * statistics.fmean(counted),
        "cores_at_5000_per_s": 5000 * (statistics.fmean(taken) + statistics.fmean(counted)),
    }


def front_ends(path: str, num_adapters: int, num_changes: int, channel: Connection) -> None:
    """Two front ends; sends the seconds of loads, each known to both, and the process's memory in GB."""

    async def run() -> list[float]:
        links = []
        for name in FRONT_ENDS:
            registry, routes = registry_of(num_adapters), make_routes(cluster())
            link = ControllerLink({"controller": Address(path=path)}, None, name, registry, routes)
            FleetClient(registry, routes, WallClock(), link.call)
            links.append((link, asyncio.create_task(link.run())))
        while any(link.state is None for link, _ in links):
            await asyncio.sleep(0.05)
        taken = []
        for number in range(num_changes):
            begin = time.perf_counter()
            await links[0][0].call("load_adapter", f"new-{number}", f"/new/{number}")
            taken.append(time.perf_counter() - begin)
            assert all(link.ranks[f"new-{number}"] == 8 for link, _ in links)
        for _, task in links:
            task.cancel()
        await asyncio.gather(*(task for _, task in links), return_exceptions=True)
        return taken

    channel.send((asyncio.run(run()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6))


async def changes(num_adapters: int, num_changes: int, idle_s: float, folder: Path) -> dict[str, float]:
    """A controller with two front ends: seconds and bytes of a change, its own time and memory."""
    registry, routes = registry_of(num_adapters), make_routes(cluster())
    adapters = FleetAdapters(registry, routes.ranks)
    controller = ClusterController(adapters)
    fleet = FleetClient(registry, routes, WallClock(), adapters.call)
    catch_up = CatchUp(registry, None)
    controlled = ControlledFleet(
        controller=controller, fleet=fleet, instance_registry=registry, routes=routes, catch_up=catch_up
    )
    listener, address = FrontEndListener(controlled, FRONT_ENDS), Address(path=str(folder / "controller"))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=front_ends, args=(str(address), num_adapters, num_changes, there))
    async with listener.open(address, None):
        running = asyncio.create_task(listener.run())
        process.start()
        before_s = time.process_time()
        taken, front_ends_gb = await asyncio.to_thread(here.recv)
        busy_s = time.process_time() - before_s
        await asyncio.to_thread(process.join)
        begin_s = time.process_time()
        await asyncio.sleep(idle_s)
        idle_cores = (time.process_time() - begin_s) / idle_s
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    log = ClusterStateLog(registry, routes, None)
    log.write()
    await adapters.call("load_adapter", "last", "/last")
    change = log.write()
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "change_p50_s": statistics.median(taken),
        "change_max_s": max(taken),
        "change_bytes": len(encode(change)),
        "state_bytes": len(encode(log.state)),
        "controller_cpu_s": busy_s,
        "idle_cores": idle_cores,
        "controller_gb": memory_kb / 1e6,
        "front_ends_gb": front_ends_gb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    record = Recorder(arguments.out)
    sizes = NUM_ADAPTERS[:1] if arguments.quick else NUM_ADAPTERS
    num_requests, num_changes, idle_s = (100, 3, 0.2) if arguments.quick else (20_000, 50, 10.0)
    for num_adapters in sizes:
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(changes(num_adapters, num_changes, idle_s, Path(folder)))
        record({"bench": "scale", "what": "changes", "num_adapters": num_adapters}, result)
        print(f"{num_adapters} adapters: " + ", ".join(f"{name} {one:.3g}" for name, one in result.items()))
        for name in ROUTINGS:
            result = decisions(name, num_adapters, num_requests)
            record({"bench": "scale", "what": name, "num_adapters": num_adapters}, result)
            print(f"  {name}: " + ", ".join(f"{key} {one:.3g}" for key, one in result.items()))
    print("goals", GOALS, "on", os.cpu_count(), "cores")


if __name__ == "__main__":
    main()
