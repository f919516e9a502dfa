"""Four engine processes of `bench_cluster`, and the systems that use them one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moe_lora.core.clock import WallClock
from moe_lora.core.config import EngineConfig, RoutingConfig
from moe_lora.core.request import EngineStats, GenerateRequest, SamplingParams, TokenOutput
from moe_lora.core.token_meter import TokenMeter
from moe_lora.engine.client import EngineClient
from moe_lora.engine.fleet import FleetClient
from moe_lora.engine.process import start_processes
from moe_lora.engine.roster import Roster
from moe_lora.engine.shares import instance_config
from moe_lora.policies.performance import PerformanceModel
from moe_lora.policies.phi_routing import PhiRouting
from moe_lora.policies.routers import RoutingContext, make_router
from moe_lora.policies.routing import Instance, RoutedView, Router
from moe_lora.report.exchange import ReplayOptions
from moe_lora.report.records import RequestRecord
from moe_lora.report.replay import replay
from moe_lora.serve.placement import PlacementController
from moe_lora.workload.plan import PlannedRequest

from .cluster_models import Files
from .cluster_plan import Plan, System
from .disagg_client import EngineCompletions

BASE_MODEL = "base"
TIMEOUT_S = 8.0
"""A request that takes longer has failed, so that an overloaded system ends."""
_IDLE_POLL_S = 0.02

Answers = dict[tuple[str | None, tuple[int, ...]], tuple[int, ...]]
"""(adapter, prompt) -> tokens, of requests that came to their end."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Instances of one kernel.  points: the file that placements read."""

    plan: Plan
    kernel: str
    clients: Sequence[EngineClient]
    files: Files
    points: Path

    def roster(self, num_instances: int | None = None) -> Roster:
        """A new one for each system: what routers know of instances begins anew."""
        return Roster(self.clients[:num_instances], self.files.adapters)


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
    )
    clients = start_processes(
        [instance_config(config, i, 0, files.adapters) for i in range(plan.num_instances)]
    )
    try:
        yield Fleet(plan=plan, kernel=kernel, clients=clients, files=files, points=points)
    finally:
        for client in clients:
            client.shut_down()


@dataclass
class Outcome:
    """What a system did.  used: per instance, the adapters of the requests that it got.  loads: adapters
    brought to each instance's arena.
    """

    records: list[RequestRecord] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    used: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    loads: list[int] = field(default_factory=list)


class _NotedRouter:
    """Tells the outcome where requests go."""

    def __init__(self, router: Router, outcome: Outcome) -> None:
        self._router = router
        self._outcome = outcome

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        chosen = self._router.choose(request, instances)
        if request.adapter is not None:
            self._outcome.used[chosen.index].add(request.adapter)
        return chosen


class _NotedFleet(FleetClient):
    """Tells the outcome what was answered."""

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
    model: PerformanceModel | None = None,
    demand: Mapping[str, float] | None = None,
    num_instances: int | None = None,
) -> Outcome:
    """Send the requests at their times.  demand: adapter -> tokens/s before them.  num_instances: the first
    so many only.  Raises KeyboardInterrupt where a signal ended it: half a run is no result.
    """
    outcome = Outcome()
    options = ReplayOptions(
        url="", model=BASE_MODEL, vocab_size=fleet.plan.size.vocab_size, timeout_s=TIMEOUT_S
    )
    connect = partial(_connected, fleet, system, model, demand or {}, outcome, fleet.roster(num_instances))
    found = replay(requests, options, connect=connect)
    if found.interrupted:
        raise KeyboardInterrupt
    outcome.records = found.records
    return outcome


@asynccontextmanager
async def _connected(
    fleet: Fleet,
    system: System,
    model: PerformanceModel | None,
    demand: Mapping[str, float],
    outcome: Outcome,
    roster: Roster,
) -> AsyncIterator[EngineCompletions]:
    """The system as `moe-lora serve` would set it up, without HTTP; its placement made anew all the time."""
    ranks: dict[str, int] = {}
    meter = TokenMeter()
    context = RoutingContext(max_num_seqs=fleet.plan.max_num_seqs, model=model, ranks=ranks)
    router = make_router(system.router, context)
    noted = _NotedRouter(router, outcome)
    client = _NotedFleet(roster, noted, WallClock(), meter=meter, ranks=ranks)
    client.outcome = outcome
    before = await _idle(fleet.clients)
    await client.model_info()
    placing = None
    if system.placement is not None:
        assert isinstance(router, PhiRouting)
        controller = await _placed(fleet, system.placement, client, router, meter, demand)
        placing = asyncio.create_task(_place(controller, fleet.plan.placement_s))
    try:
        yield EngineCompletions(client, BASE_MODEL)
    finally:
        if placing is not None:
            placing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await placing
    after = await _idle(fleet.clients)
    outcome.loads = [b.adapter_loads - a.adapter_loads for a, b in zip(before, after, strict=True)]


async def _placed(
    fleet: Fleet,
    placement: str,
    client: EngineClient,
    router: PhiRouting,
    meter: TokenMeter,
    demand: Mapping[str, float],
) -> PlacementController:
    """The controller after its first step, which had this demand."""
    step_s = fleet.plan.placement_s
    config = RoutingConfig(
        placement=placement, placement_interval_s=step_s, operating_points=str(fleet.points)
    )
    controller = PlacementController(config, client, router, meter, _StepEarlier(step_s))
    for adapter, tokens_per_s in demand.items():
        meter.add(adapter, round(tokens_per_s * step_s))
    await controller.step()
    if controller.num_problems:
        raise RuntimeError(f"the placement {placement} could not be made; see the log")
    return controller


class _StepEarlier(WallClock):
    """A clock whose first reading lies step_s back, so that a time step has passed at the second."""

    def __init__(self, step_s: float) -> None:
        self._back_s = step_s

    def now_s(self) -> float:
        back_s, self._back_s = self._back_s, 0.0
        return super().now_s() - back_s


async def _place(controller: PlacementController, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await controller.step()


async def _idle(clients: Sequence[EngineClient]) -> list[EngineStats]:
    """Their stats once nothing runs: requests given up may still be there for a moment."""
    while True:
        stats = await asyncio.gather(*(client.stats() for client in clients))
        if not any(one.num_running + one.num_waiting for one in stats):
            return list(stats)
        await asyncio.sleep(_IDLE_POLL_S)


@dataclass(frozen=True, kw_only=True)
class Unloaded:
    """Medians, one request at a time.  load_s_per_rank: to bring in an adapter of the highest rank, by it."""

    ttft_s: float
    no_lora_ttft_s: float
    load_s_per_rank: float


def unloaded(fleet: Fleet, num_requests: int = 7) -> Unloaded:
    """Ask each instance for every adapter once, then the first one for single requests."""
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
    """TTFT and the part of it in which the adapter was brought in, in seconds."""
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
