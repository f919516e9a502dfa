"""A simulated system: requests come, a router chooses an instance, everybody's events share one queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from moe_lora.workload.plan import PlannedRequest

from .adapters import LoadLink
from .config import LoraServerConfig, SystemConfig
from .events import EventQueue
from .instance import SimInstance
from .local_adapters import LocalAdapters
from .lora_server import SimLoraServer
from .requests import SimRequest, from_plan
from .result import SimResult
from .step_time import step_timer


def simulate(config: SystemConfig, requests: Sequence[PlannedRequest]) -> SimResult:
    """Every request through the system, to its last token.  Nothing is drawn: equal arguments, equal results.

    requests: by arrival.  Raises ValueError if they are not, or one has no token to generate, CapacityError
    for one that is too long for an instance.
    """
    system = System(config)
    system.replay(requests)
    return SimResult(
        requests=system.done,
        num_events=system.events.num_events,
        num_steps=sum(instance.num_steps for instance in system.instances),
        num_loads=sum(link.num_loads for link in system.links),
        end_s=max((request.finish_s for request in system.done), default=0.0),
    )


class System:
    """Instances, what their adapters come from, and the router before them.

    done: finished requests, in the order in which they finished.  links: over which adapters are loaded.
    """

    def __init__(self, config: SystemConfig) -> None:
        self.events = EventQueue()
        self.done: list[SimRequest] = []
        self.links: list[LoadLink] = []
        self._router = config.router()
        self._uids: dict[str, int] = {}
        remote = isinstance(config.adapters, LoraServerConfig)
        instance = config.instance
        step_time = step_timer(instance, remote=remote)
        self._lora_ranks = config.lora_ranks
        self.instances = [
            SimInstance(index, instance, step_time, self.events, self.done.append)
            for index in range(config.num_instances)
        ]
        self._connect(config)

    def replay(self, requests: Sequence[PlannedRequest]) -> None:
        """Let the requests come, and run until nothing is left to do."""
        self._expect(iter(requests))
        self.events.run()
        assert len(self.done) == len(requests), "a request was forgotten"

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
            instance.connect(local)
