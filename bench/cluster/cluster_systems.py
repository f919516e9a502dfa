# SPDX-License-Identifier: Apache-2.0
"""The systems of `bench_cluster`: a front end each, over the same engine processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from bench.lora_server.disagg_client import EngineCompletions
from moe_lora.config import FrontEndConfig, RoutingConfig
from moe_lora.config.plan import ReplayOptions
from moe_lora.core.clock import WallClock
from moe_lora.core.records import PlacementQuality
from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.placement_controller import PlacementController
from moe_lora.dist.cluster.controller.routes import Routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.policies.routing.demand import DemandMeter
from moe_lora.policies.routing.model_routing import CostModel
from moe_lora.policies.routing.routers import PhiRouting, RoutingContext, make_router
from moe_lora.policies.routing.routing import Instance, RoutedView, Router
from moe_lora.report.latency import RequestRecord
from moe_lora.report.replay import replay
from moe_lora.workload.replay_plan import PlannedRequest

from .cluster_fleet import Fleet, idle
from .cluster_plan import TIMEOUT_S, System

BASE_MODEL = "base"

Answers = dict[tuple[str | None, tuple[int, ...]], tuple[int, ...]]
"""(adapter, prompt) -> tokens, of completed requests."""


@dataclass
class Outcome:
    """Result of a system.  placements: by time step; empty if everything is everywhere.  used: adapters of
    each instance's requests.  loads: adapters loaded into each instance's arena.
    """

    records: list[RequestRecord] = field(default_factory=list)
    placements: list[PlacementQuality] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    used: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    loads: list[int] = field(default_factory=list)


class _NotedRouter:
    """Records the requests' instances in the outcome."""

    def __init__(self, router: Router, outcome: Outcome) -> None:
        self._router = router
        self._outcome = outcome

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        chosen = self._router.choose(request, instances)
        if request.adapter is not None:
            self._outcome.used[chosen.index].add(request.adapter)
        return chosen


class _NotedFleet(FleetClient):
    """Records the answers in the outcome."""

    outcome: Outcome

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        tokens: tuple[int, ...] = ()
        async for output in super().generate(request):
            tokens += output.token_ids
            if output.finish_reason == "length":
                self.outcome.answers[request.adapter, request.prompt_token_ids] = tokens
            yield output


def run_system(
    fleet: Fleet,
    system: System,
    requests: Sequence[PlannedRequest],
    model: CostModel | None = None,
    demand: Mapping[str, float] | None = None,
    num_instances: int | None = None,
) -> Outcome:
    """Send the requests at their times.

    demand: adapter -> tokens/s before them.  num_instances: uses only the first ones.  Raises
    KeyboardInterrupt after a signal: half a run is no result.
    """
    outcome = Outcome()
    options = ReplayOptions(
        url="", model=BASE_MODEL, vocab_size=fleet.plan.size.vocab_size, timeout_s=TIMEOUT_S
    )
    connect = partial(
        _connected, fleet, system, model, demand or {}, outcome, fleet.instance_registry(num_instances)
    )
    found = replay(requests, options, connect=connect)
    if found.interrupted:
        raise KeyboardInterrupt
    outcome.records = found.records
    return outcome


@asynccontextmanager
async def _connected(
    fleet: Fleet,
    system: System,
    model: CostModel | None,
    demand: Mapping[str, float],
    outcome: Outcome,
    instance_registry: InstanceRegistry,
) -> AsyncIterator[EngineCompletions]:
    """The system as in `moe-lora serve`, without HTTP, with continuous placement."""
    ranks: dict[str, int] = {}
    meter = DemandMeter()
    context = RoutingContext(max_num_seqs=fleet.plan.max_num_seqs, model=model, ranks=ranks)
    router = make_router(system.router, context)
    noted = _NotedRouter(router, outcome)
    routes = Routes(config=FrontEndConfig(), router=noted, meter=meter, ranks=ranks)
    adapters = FleetAdapters(instance_registry, ranks)
    client = _NotedFleet(instance_registry, routes, WallClock(), adapters.call)
    client.outcome = outcome
    before = await idle(fleet.clients)
    await client.model_info()
    placing = None
    if system.placement is not None:
        assert isinstance(router, PhiRouting)
        controller = await _placed(fleet, system.placement, client, router, meter, demand)
        placing = asyncio.create_task(_place(controller, fleet.plan.placement_s, outcome))
    try:
        yield EngineCompletions(client, BASE_MODEL)
    finally:
        if placing is not None:
            placing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await placing
    after = await idle(fleet.clients)
    outcome.loads = [b.adapter_loads - a.adapter_loads for a, b in zip(before, after, strict=True)]


async def _placed(
    fleet: Fleet,
    placement: str,
    client: FleetClient,
    router: PhiRouting,
    meter: DemandMeter,
    demand: Mapping[str, float],
) -> PlacementController:
    """The controller after its first step with this demand."""
    step_s = fleet.plan.placement_s
    config = RoutingConfig(
        placement=placement, placement_interval_s=step_s, operating_points=str(fleet.points)
    )
    controller = PlacementController(config, client, router, meter, _StepEarlier(step_s))
    meter.add({adapter: round(tokens_per_s * step_s) for adapter, tokens_per_s in demand.items()})
    await controller.step()
    if controller.num_problems:
        raise RuntimeError(f"the placement {placement} could not be made; see the log")
    return controller


class _StepEarlier(WallClock):
    """A clock with its first reading step_s back: a time step has passed at the second."""

    def __init__(self, step_s: float) -> None:
        self._back_s = step_s

    def now_s(self) -> float:
        back_s, self._back_s = self._back_s, 0.0
        return super().now_s() - back_s


async def _place(controller: PlacementController, interval_s: float, outcome: Outcome) -> None:
    while True:
        if controller.latest is not None:
            outcome.placements.append(controller.latest)
        await asyncio.sleep(interval_s)
        await controller.step()
