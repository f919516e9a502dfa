# SPDX-License-Identifier: Apache-2.0
"""A simulated system: requests, a router, instances, one event queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lora.cache.leases.leases import Grant, LeaseTable
from moe_lora.cache.leases.residency import Load
from moe_lora.core.clock import Clock
from moe_lora.core.errors import ConfigError
from moe_lora.policies.routing.demand import DemandMeter
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.policies.routing.routing import listeners
from moe_lora.sim.events import EventQueue
from moe_lora.sim.prefill_first import PrefillFirst
from moe_lora.workload.replay_plan import PlannedRequest
from moe_lora.workload.statistics import mean, percentile

from .instance import SimInstance, StepTime
from .running import SimRequest
from .sources import AdapterSource, LoadLink, LocalAdapters, SimAdapter
from .system_config import AdapterBytes, PlacementConfig, SimLoraServerConfig, SystemConfig, bytes_of


class SimLoraServer:
    """Uses the real leader's lease table (capacity in slots, not pages)."""

    def __init__(
        self, config: SimLoraServerConfig, adapter_bytes: AdapterBytes, num_layers: int, clock: Clock
    ) -> None:
        self.link = LoadLink(config.load_bytes_per_s, num_layers, layer_wise=config.layer_wise)
        self.clock = clock
        self._table = LeaseTable(config.capacity, (), 1, starvation_s=config.starvation_s)
        self._adapter_bytes = adapter_bytes
        self._num_stages = config.num_stages
        self._control_s = config.control_s
        self._clients: list[RemoteAdapters] = []
        self._loaded_s = dict.fromkeys(config.prefetched, (-math.inf, -math.inf))
        self._table.prefill(config.prefetched)

    def client(self, on_grant: Callable[[], None], on_contention: Callable[[], None]) -> RemoteAdapters:
        """Access for an instance.  on_grant: an adapter is ready or loading.  on_contention: layer times may
        change.
        """
        client = RemoteAdapters(self, str(len(self._clients)), on_grant, on_contention)
        self._clients.append(client)
        return client

    def acquire(self, instance: str, name: str) -> None:
        """Give the instance a lease, now or later."""
        self._table.register(name, {})
        self._table.acquire(instance, name, self.clock.now_s())
        self._carry_out()

    def release(self, instance: str, name: str) -> None:
        self._table.release(instance, name, self.clock.now_s())
        self._carry_out()

    def work(self, client: RemoteAdapters, layer_s: float, delta_s: float) -> float:
        """See `AdapterSource.work`; notifies affected instances."""
        before_s = sum(one.delta_s for one in self._clients)
        client.layer_s, client.delta_s = layer_s, delta_s
        after_s = sum(one.delta_s for one in self._clients)
        if before_s != after_s:
            most_s = max(before_s, after_s) / self._num_stages
            for other in self._clients:
                if other is not client and 0 < other.layer_s < most_s:
                    other.on_contention()
        return after_s / self._num_stages if delta_s else 0.0

    def _carry_out(self) -> None:
        self._table.grant_due(self.clock.now_s())
        for event in self._table.take_events():
            if isinstance(event, Load):
                num_bytes = bytes_of(self._adapter_bytes, event.adapter_id)
                self._loaded_s[event.adapter_id] = self.link.load(self.clock.now_s(), num_bytes)
            elif isinstance(event, Grant):
                told_s = self.clock.now_s() + self._control_s
                self._clients[int(event.instance)].take(
                    event.adapter_id, told_s, *self._loaded_s[event.adapter_id]
                )


class RemoteAdapters(AdapterSource):
    """`AdapterSource` of an instance: an adapter is ready with a lease.

    Only the lease table stops requests behind a starving request: instances could block each other forever.
    """

    def __init__(
        self,
        server: SimLoraServer,
        instance: str,
        on_grant: Callable[[], None],
        on_contention: Callable[[], None],
    ) -> None:
        super().__init__(server.clock)
        self.on_contention = on_contention
        self.layer_s = self.delta_s = 0.0
        self._instance = instance
        self._on_grant = on_grant
        self._server = server
        self._leases: set[str] = set()
        self._waits: set[str] = set()

    def hold(self, adapter: SimAdapter) -> bool:
        name = adapter.name
        if name not in self._leases and name not in self._waits:
            self._server.acquire(self._instance, name)
            if name not in self._leases:
                self._waits.add(name)
        return name in self._leases

    def let_go(self, adapter: SimAdapter) -> bool:
        self._leases.remove(adapter.name)
        self._server.release(self._instance, adapter.name)
        return False

    def take(self, name: str, told_s: float, first_layer_s: float, last_layer_s: float) -> None:
        """Record the lease: known at told_s, loaded at the given times."""
        self._leases.add(name)
        adapter = self._adapters[name]
        adapter.told_s, adapter.first_layer_s, adapter.last_layer_s = told_s, first_layer_s, last_layer_s
        if name in self._waits:
            self._waits.remove(name)
            self._on_grant()

    def work(self, layer_s: float, delta_s: float) -> float:
        return self._server.work(self, layer_s, delta_s)


class SimPlacement:
    """Runs a planner every interval, routes by its table, and updates hosts.

    Tokens count at arrival; placing takes no time.
    """

    def __init__(
        self,
        config: PlacementConfig,
        router: PhiRouting,
        sources: Sequence[LocalAdapters],
        events: EventQueue,
        goes_on: Callable[[], bool],
    ) -> None:
        self.held: list[list[int]] = []
        self._planner = config.planner()
        self._interval_s = config.interval_s
        self._router = router
        self._sources = sources
        self._events = events
        self._goes_on = goes_on
        self._meter = DemandMeter(config.mean_output_tokens)

    def begin(self) -> None:
        """Install the first table and adapters."""
        for source, names in zip(self._sources, self._place(0.0), strict=True):
            source.begin_with(names)
        self._events.at(self._interval_s, self._step)

    def start(self, request: SimRequest) -> None:
        self._meter.start(request.index, request)

    def stop(self, request: SimRequest) -> None:
        self._meter.stop(request.index, request.output_tokens)

    def _step(self) -> None:
        if not self._goes_on():
            return
        for source, names in zip(self._sources, self._place(self._interval_s), strict=True):
            source.keep(names)
        self._events.at(self._events.now_s() + self._interval_s, self._step)

    def _place(self, length_s: float) -> list[set[str]]:
        table = {name: list(row) for name, row in self._planner(self._meter.read(), length_s).items()}
        self._router.swap(table)
        names: list[set[str]] = [set() for _ in self._sources]
        for name, row in table.items():
            for index, _ in row:
                names[index].add(name)
        self.held.append([len(here) for here in names])
        return names


def simulate(
    config: SystemConfig,
    requests: Sequence[PlannedRequest],
    give_up: Callable[[SimRequest], bool] | None = None,
) -> System:
    """The system after every request's last token; deterministic.

    requests: by arrival.  give_up: per finished request; True ends the simulation.  Raises ValueError for
    unsorted requests or no output tokens, CapacityError for a too long request, ConfigError for a placement
    without its router.
    """
    system = System(config, give_up)
    system.replay(requests)
    return system


class System:
    """Instances, adapter sources, and the router."""

    def __init__(self, config: SystemConfig, give_up: Callable[[SimRequest], bool] | None = None) -> None:
        self.events = EventQueue()
        self.requests: list[SimRequest] = []
        """In order of finish."""
        self.links: list[LoadLink] = []
        self.sources: list[LocalAdapters] = []
        self.placement: SimPlacement | None = None
        self.stopped = False
        """True if ended before the last request."""
        self._give_up = give_up
        self._num_expected = 0
        self._router = config.router()
        self._listeners = listeners(self._router)
        self._lora_ranks = config.lora_ranks
        self.instances: list[SimInstance] = []
        for index in range(config.num_instances):
            instance, adapters = config.parts_of(index)
            step_time = StepTime(instance, remote=isinstance(adapters, SimLoraServerConfig))
            self.instances.append(SimInstance(index, instance, step_time, self.events, self._finish))
        self._connect(config)
        self._for_prompts: Sequence[SimInstance] = self.instances
        self.prefill_first: PrefillFirst | None = None
        if config.prefill is not None:
            self.prefill_first = PrefillFirst(config.prefill, self.events, self._router, self.instances)
            self._for_prompts = self.prefill_first.for_prompts
        if config.placement is not None:
            self.placement = self._placed(config.placement)

    @property
    def num_steps(self) -> int:
        """Of all instances."""
        return sum(instance.num_steps for instance in self.instances)

    @property
    def num_loads(self) -> int:
        """Of adapters."""
        return sum(link.num_loads for link in self.links)

    @property
    def num_fetches(self) -> int:
        """Adapters fetched from another host."""
        return sum(source.fetches.num_loads for source in self.sources)

    @property
    def held(self) -> Sequence[Sequence[int]]:
        """Adapters per instance, by placement table."""
        return [] if self.placement is None else self.placement.held

    @property
    def end_s(self) -> float:
        """Time of the last finish."""
        return max((request.finish_s for request in self.requests), default=0.0)

    def column(self, name: str, since_s: float = 0.0) -> NDArray[np.float64]:
        """The named attribute of requests with arrival >= since_s."""
        return np.array([getattr(r, name) for r in self.requests if r.arrival_s >= since_s], dtype=np.float64)

    def summary(self, since_s: float = 0.0) -> dict[str, Any]:
        """Summary of requests with arrival >= since_s; None for empty means.

        Shares of admitted_at_once, waited_for_adapter and waited_for_room sum to 1.
        """
        at_once = self.column("at_once", since_s)
        for_adapter = self.column("waited_for_adapter", since_s)
        ttft_s = self.column("ttft_s", since_s)
        tpot_s = self.column("tpot_s", since_s)
        return {
            "kind": "simulated",
            "num_requests": len(at_once),
            "admitted_at_once": mean(at_once),
            "waited_for_adapter": mean(for_adapter),
            "waited_for_room": mean(1 - at_once - for_adapter),
            "mean_ttft_s": mean(ttft_s),
            "p50_ttft_s": percentile(ttft_s, 50),
            "p95_ttft_s": percentile(ttft_s, 95),
            "p95_decode_ttft_s": percentile(self.column("decode_ttft_s", since_s), 95),
            "mean_tpot_s": mean(tpot_s[~np.isnan(tpot_s)]),
        }

    def replay(self, requests: Sequence[PlannedRequest]) -> None:
        """Feed the requests and run to the end."""
        self._num_expected = len(requests)
        if self.placement is not None:
            self.placement.begin()
        self._expect(iter(requests))
        self.events.run()
        assert self.stopped or len(self.requests) == len(requests), "a request was forgotten"

    def _expect(self, requests: Iterator[PlannedRequest]) -> None:
        planned = next(requests, None)
        if planned is not None:
            self.events.at(planned.arrival_s, partial(self._arrive, planned, requests))

    def _arrive(self, planned: PlannedRequest, later: Iterator[PlannedRequest]) -> None:
        self._expect(later)
        if planned.output_tokens < 1:
            raise ValueError(
                f"request {planned.index} has output_tokens={planned.output_tokens}; give 1 or more"
            )
        request = SimRequest(
            planned.index,
            planned.arrival_s,
            planned.adapter,
            planned.prompt_tokens,
            planned.output_tokens,
            0 if planned.adapter is None else self._lora_ranks.get(planned.adapter, 0),
            hash_ids=planned.hash_ids,
        )
        if self.placement is not None:
            self.placement.start(request)
        self._router.choose(request, self._for_prompts).add(request)

    def _finish(self, request: SimRequest) -> None:
        self.requests.append(request)
        if self.prefill_first is not None:
            self.prefill_first.end(request)
        for listener in self._listeners:
            listener.stop(request.index, request.output_tokens)
        if self.placement is not None:
            self.placement.stop(request)
        if self._give_up is not None and self._give_up(request):
            self.stopped = True
            self.events.stop()

    def _placed(self, config: PlacementConfig) -> SimPlacement:
        if not isinstance(self._router, PhiRouting):
            raise ConfigError("a placement needs a router that goes by it; give router=PhiRouting")
        return SimPlacement(
            config, self._router, self.sources, self.events, lambda: len(self.requests) < self._num_expected
        )

    def _connect(self, config: SystemConfig) -> None:
        server: SimLoraServer | None = None
        for instance in self.instances:
            part, adapters = config.parts_of(instance.index)
            if isinstance(adapters, SimLoraServerConfig):
                if server is None:
                    server = SimLoraServer(adapters, config.adapter_bytes, part.num_layers, self.events)
                    self.links.append(server.link)
                instance.connect(server.client(instance.freed, instance.look_again))
                continue
            local = LocalAdapters(adapters, config.adapter_bytes, self.events)
            local.prefetch(adapters.prefetched)
            self.links.append(local.link)
            self.sources.append(local)
            instance.connect(local)
