"""A front end that a controller directs: it routes by itself, and has everything else decided."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

from moe_lora.adapters.registry.registry import RegisteredAdapter
from moe_lora.config import ProvisionConfig
from moe_lora.core.clock import Clock
from moe_lora.core.errors import AdapterNotFoundError, EngineDeadError
from moe_lora.core.request import AdapterInfo, GenerateRequest, RequestTiming, TokenOutput
from moe_lora.dist.cluster.instances import Holding, Instance, InstanceRegistry, Served, ServedVersion
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.lora_server.protocol.control_messages import ServerState
from moe_lora.engine.client.client import EngineClient
from moe_lora.policies.routers import PhiRouting
from moe_lora.provision.online import Outlook
from moe_lora.provision.placement.placement_problem import PlacementQuality

from .cluster_state import ClusterState, ControllerMethods, Figures, FrontEndReport, VisitEvent
from .controller_link import ControllerLink
from .placement_controller import Routes

# The registry of instances of a front end whose adapters a controller looks after.


class DirectedInstanceRegistry(InstanceRegistry):
    """Instances take part as they are; one is no candidate for adapters of which it lacks what is served."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._holdings: Mapping[str, Holding] = {}
        self.directed = False
        """Whether the controller has said what is served; until then it is what instances have."""

    def join_as_it_is(
        self, instance: Instance, client: EngineClient, have: dict[str, ServedVersion], incarnation: str
    ) -> None:
        """Put an instance into routing whose adapters a controller looks after.

        It is no candidate for those of which `have` lacks what is served, unless the controller, which may
        have brought them meanwhile, says that it holds them.  Raises EngineDeadError if the fleet was closed.
        """
        if self.closed.is_set():
            raise EngineDeadError("the instances were closed")
        if not self.directed:
            self.recover(Served.of(have))
        holding = self._holdings.get(instance.name)
        if holding is not None and holding.incarnation == incarnation:
            missing = set(holding.missing)
        else:
            missing = self.served.lacking(have)
        self._route_to(instance, client, missing, incarnation)

    def follow(self, served: Served, holdings: Mapping[str, Holding]) -> None:
        """From now on this is served, as a controller says, and its instances hold that.

        One that the controller does not see did not get what is new.
        """
        self.directed = True
        new = served.lacking(self._adapters)
        self._adapters, self._versions = dict(served.adapters), dict(served.versions)
        self._holdings = holdings
        for instance in self.instances:
            holding = holdings.get(instance.name)
            if holding is not None and holding.incarnation == instance.incarnation:
                instance.missing = set(holding.missing)
            else:
                instance.missing |= new


READY_S = 5.0
_LOOK_S = 0.05


class DirectedFleet(FleetClient):
    """`EngineClient` whose adapters are loaded, unloaded and pinned by the controller.

    What is only asked (lists, statistics) comes from the instances, also while the controller is away.
    """

    def __init__(
        self, instance_registry: DirectedInstanceRegistry, routes: Routes, link: ControllerLink, clock: Clock
    ) -> None:
        super().__init__(instance_registry, routes.router, clock, meter=routes.meter, ranks=routes.ranks)
        self._link = link

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        if request.adapter is not None and self._instance_registry.version(request.adapter) is None:
            # An instance that the controller does not see may still have it; without any nobody knows.
            self._instance_registry.candidates(None)
            raise AdapterNotFoundError(f"adapter {request.adapter!r} is not loaded")
        outputs = cast("AsyncGenerator[TokenOutput, None]", super().generate(request))
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        version: int | None = None,
        content_hash: str | None = None,
    ) -> AdapterInfo:
        assert version is content_hash is None, "the controller says which"
        return cast("AdapterInfo", await self._link.call("load_adapter", name, path, replace))

    async def unload_adapter(self, name: str) -> None:
        await self._link.call("unload_adapter", name)

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        return cast("AdapterInfo", await self._link.call("pin_adapter", name, pinned))


class DirectedRouting:
    """Brings what the controller says to the `InstanceRegistry` and the router, and reports to it.

    It is also what the front end shows as its placement: see `controller_views.PlacementView`.
    """

    def __init__(
        self, instance_registry: DirectedInstanceRegistry, routes: Routes, provision: DirectedProvision
    ) -> None:
        self._instance_registry = instance_registry
        self._routes = routes
        self._provision = provision
        self._figures = Figures()

    async def ready(self) -> None:
        """Return when this front end knows what is served and has an instance, or after READY_S.

        Until then one that starts again beside others leaves requests to them.
        """
        waited_s = 0.0
        while waited_s < READY_S and not (self._instance_registry.directed and self._instance_registry.live):
            await asyncio.sleep(_LOOK_S)
            waited_s += _LOOK_S

    def follow(self, state: ClusterState) -> None:
        self._instance_registry.follow(state.served, state.holdings)
        self._routes.ranks.clear()
        self._routes.ranks.update(state.ranks)
        router = self._routes.router
        if isinstance(router, PhiRouting) and state.table_version != router.version:
            number_of = self._instance_registry.number_of
            router.swap(
                {name: [(number_of(one), phi) for one, phi in row] for name, row in state.table.items()}
            )
            router.version = state.table_version

    def show(self, figures: Figures) -> None:
        self._figures = figures
        self._provision.latest = figures.outlook

    def report(self) -> FrontEndReport | None:
        tokens, visits = self._routes.meter.take(), self._provision.window.take()
        return FrontEndReport(tokens, visits) if tokens or visits else None

    @property
    def version(self) -> int:
        router = self._routes.router
        return router.version if isinstance(router, PhiRouting) else 0

    @property
    def num_copies(self) -> int:
        return self._figures.num_copies

    @property
    def num_problems(self) -> int:
        return self._figures.num_problems

    @property
    def latest(self) -> PlacementQuality | None:
        return self._figures.quality

    @property
    def has_points(self) -> bool:
        return self._routes.config.operating_points is not None


class ReportedWindow:
    """Notes what requests do, for the controller's `DemandWindow`."""

    def __init__(self) -> None:
        self._events: list[VisitEvent] = []
        self._numbers = itertools.count()

    def begin(self, adapter: str) -> ReportedVisit:
        number = next(self._numbers)
        self._events.append(VisitEvent("begin", number, adapter))
        return ReportedVisit(self._events.append, number)

    def take(self) -> tuple[VisitEvent, ...]:
        """What was noted; noting begins anew."""
        taken = tuple(self._events)
        self._events.clear()
        return taken


class ReportedVisit:
    """One request of such a window."""

    __slots__ = ("_note", "_number")

    def __init__(self, note: Callable[[VisitEvent], None], number: int) -> None:
        self._note = note
        self._number = number

    def start(self) -> None:
        self._note(VisitEvent("start", self._number))

    def refuse(self) -> None:
        self._note(VisitEvent("refuse", self._number))

    def end(self, timing: RequestTiming | None) -> None:
        self._note(VisitEvent("end", self._number, timing=timing))


class DirectedProvision:
    """The controller's provisioning, as a front end shows it: see `controller_views.ProvisionView`."""

    def __init__(self, config: ProvisionConfig, has_server: bool, link: ControllerLink) -> None:
        self.config = config
        self.has_server = has_server
        self.window = ReportedWindow()
        self.latest: Outlook | None = None
        self._link = link

    async def server_state(self) -> ServerState | None:
        return cast("ServerState | None", await self._link.call("server_state"))

    async def resize(self, capacity: int) -> ServerState:
        return cast("ServerState", await self._link.call("resize", capacity))


class DirectedRegistry:
    """The registry that the controller has opened: see `served_registry.ServedRegistry`."""

    def __init__(self, link: ControllerLink) -> None:
        self._link = link

    async def base(self) -> str:
        return cast("str", await self._link.call("registry_base"))

    async def resolve(self, name: str) -> RegisteredAdapter:
        return cast("RegisteredAdapter", await self._link.call("registry_resolve", name))

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        signature = inspect.signature(getattr(ControllerMethods, f"registry_{method}"))
        bound = signature.bind(None, *args, **keywords)
        bound.apply_defaults()
        return await self._link.call(f"registry_{method}", *bound.args[1:])
