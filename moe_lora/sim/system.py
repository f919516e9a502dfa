"""A simulated system: requests come, a router chooses an instance, everybody's events share one queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from moe_lora.core.errors import ConfigError
from moe_lora.policies.phi_routing import PhiRouting
from moe_lora.workload.replay_plan import PlannedRequest

from .sources import LoadLink
from .system_config import LoraServerConfig, PlacementConfig, SystemConfig
from .events import EventQueue
from .instance import SimInstance
from .local_adapters import LocalAdapters
from .lora_server import SimLoraServer
from .placement import SimPlacement
from .requests import SimRequest, from_plan
from .result import SimResult
from .step_time import step_timer


def simulate(
    config: SystemConfig,
    requests: Sequence[PlannedRequest],
    give_up: Callable[[SimRequest], bool] | None = None,
) -> SimResult:
    """Every request through the system, to its last token.  Nothing is drawn: equal arguments, equal results.

    requests: by arrival.  give_up: told of each request that is done; True ends the simulation there.
    Raises ValueError if requests are not by arrival, or one has no token to generate, CapacityError for one
    that is too long for an instance, ConfigError for a placement whose router does not go by it.
    """
    system = System(config, give_up)
    system.replay(requests)
    return SimResult(
        requests=system.done,
        num_events=system.events.num_events,
        num_steps=sum(instance.num_steps for instance in system.instances),
        num_loads=sum(link.num_loads for link in system.links),
        end_s=max((request.finish_s for request in system.done), default=0.0),
        stopped=system.stopped,
        num_fetches=sum(source.fetches.num_loads for source in system.sources),
        held=[] if system.placement is None else system.placement.held,
    )


class System:
    """Instances, what their adapters come from, and the router before them.

    done: finished requests, in the order in which they finished.  links: over which adapters are loaded.
    sources: of the instances, where each has its own.
    """

    def __init__(self, config: SystemConfig, give_up: Callable[[SimRequest], bool] | None = None) -> None:
        self.events = EventQueue()
        self.done: list[SimRequest] = []
        self.links: list[LoadLink] = []
        self.sources: list[LocalAdapters] = []
        self.placement: SimPlacement | None = None
        self.stopped = False
        self._give_up = give_up
        self._num_expected = 0
        self._router = config.router()
        self._uids: dict[str, int] = {}
        remote = isinstance(config.adapters, LoraServerConfig)
        instance = config.instance
        step_time = step_timer(instance, remote=remote)
        self._lora_ranks = config.lora_ranks
        self.instances = [
            SimInstance(index, instance, step_time, self.events, self._finish)
            for index in range(config.num_instances)
        ]
        self._connect(config)
        if config.placement is not None:
            self.placement = self._placed(config.placement)

    def replay(self, requests: Sequence[PlannedRequest]) -> None:
        """Let the requests come, and run until nothing is left to do."""
        self._num_expected = len(requests)
        if self.placement is not None:
            self.placement.begin()
        self._expect(iter(requests))
        self.events.run()
        assert self.stopped or len(self.done) == len(requests), "a request was forgotten"

    def _expect(self, requests: Iterator[PlannedRequest]) -> None:
        planned = next(requests, None)
        if planned is not None:
            self.events.at(planned.arrival_s, partial(self._arrive, planned, requests))

    def _arrive(self, planned: PlannedRequest, later: Iterator[PlannedRequest]) -> None:
        self._expect(later)
        name = planned.adapter
        uid = None if name is None else self._uids.setdefault(name, len(self._uids) + 1)
        request = from_plan(planned, uid, 0 if name is None else self._lora_ranks.get(name, 0))
        self._router.choose(request, self.instances).add(request)

    def _finish(self, request: SimRequest) -> None:
        self.done.append(request)
        if self.placement is not None:
            self.placement.count(request)
        if self._give_up is not None and self._give_up(request):
            self.stopped = True
            self.events.stop()

    def _placed(self, config: PlacementConfig) -> SimPlacement:
        if not isinstance(self._router, PhiRouting):
            raise ConfigError("a placement needs a router that goes by it; give router=PhiRouting")
        return SimPlacement(
            config, self._router, self.sources, self.events, lambda: len(self.done) < self._num_expected
        )

    def _connect(self, config: SystemConfig) -> None:
        adapters = config.adapters
        if isinstance(adapters, LoraServerConfig):
            server = SimLoraServer(adapters, config.adapter_bytes, config.instance.num_layers, self.events)
            self.links = [server.link]
            for instance in self.instances:
                instance.connect(server.client(instance.freed, instance.look_again))
            return
        for instance in self.instances:
            local = LocalAdapters(adapters, config.adapter_bytes, self.events)
            self.links.append(local.link)
            self.sources.append(local)
            instance.connect(local)
