"""What travels between the controller and the front ends, over links of `dist.net`."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from moe_lora.adapters.registry.registry import RegisteredAdapter
from moe_lora.core.request import AdapterInfo, RequestTiming
from moe_lora.dist.cluster.instances import Holding, InstanceRegistry, Served
from moe_lora.dist.lora_server.protocol.control_messages import ServerState
from moe_lora.dist.net.codec import Interface, Message, Protocol
from moe_lora.dist.net.connection import Pings
from moe_lora.policies.routers import PhiRouting
from moe_lora.provision.online import Outlook
from moe_lora.provision.placement.placement_problem import PlacementQuality

from .placement_controller import PlacementController, Routes

PROTOCOL_VERSION = 2
PINGS = Pings(interval_s=1.0, timeout_s=4.0)


class ClusterState(Message, frozen=True, kw_only=True):
    """What the controller has decided.

    number: counts up with each change, also over the controller's restarts.  ranks: LoRA ranks by adapter.
    holdings: of the instances in the controller's routing.  table: adapter -> (instance name, phi) of the
    routing table, and the number of that; demand: tokens/s by adapter that it was made for.
    """

    number: int
    served: Served = field(default_factory=Served)
    ranks: Mapping[str, int] = field(default_factory=dict)
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    table: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    table_version: int = 0
    demand: Mapping[str, float] = field(default_factory=dict)


class FrontEndHello(Message, frozen=True, kw_only=True):
    """A front end's first message.  state: the last one that it had from a controller."""

    name: str
    state: ClusterState | None
    protocol: int = PROTOCOL_VERSION


class Admitted(Message, frozen=True):
    """The controller's answer.  refusal: why the front end can't take part; None: it does."""

    refusal: str | None = None


@dataclass(frozen=True)
class VisitEvent:
    """What a request for an adapter did.  number: of the request, unlike others of its front end."""

    kind: Literal["begin", "start", "refuse", "end"]
    number: int
    adapter: str | None = None
    timing: RequestTiming | None = None


class FrontEndReport(Message, frozen=True):
    """What a front end's requests did since the last report.  tokens: by adapter."""

    tokens: Mapping[str, int]
    visits: tuple[VisitEvent, ...]


class Taken(Message, frozen=True):
    """The front end routes by the state of this number, or by a later one."""

    number: int


class Figures(Message, frozen=True, kw_only=True):
    """What the controller's metrics would say.  num_copies, num_problems, quality: see
    `PlacementController`.  outlook: of `CapacityController`.
    """

    num_copies: int = 0
    num_problems: int = 0
    quality: PlacementQuality | None = None
    outlook: Outlook | None = None


class ControllerMethods(typing.Protocol):
    """What front ends may call."""

    def load_adapter(self, name: str, path: str, replace: bool) -> AdapterInfo: ...

    def unload_adapter(self, name: str) -> None: ...

    def pin_adapter(self, name: str, pinned: bool) -> AdapterInfo: ...

    def server_state(self) -> ServerState | None: ...

    def resize(self, capacity: int) -> ServerState: ...

    def registry_base(self) -> str: ...

    def registry_resolve(self, name: str) -> RegisteredAdapter: ...

    def registry_adapters(self, state: str | None, after: str, limit: int) -> list[RegisteredAdapter]: ...

    def registry_add(
        self, name: str, source: str, base_hash: str, owner: str = "", link: bool = False
    ) -> RegisteredAdapter: ...

    def registry_check(self) -> list[tuple[RegisteredAdapter, str | None]]: ...

    def registry_versions(self, name: str) -> list[RegisteredAdapter]: ...

    def registry_remove(self, name: str, version: int | None) -> list[RegisteredAdapter]: ...


CONTROLLER_METHODS = Interface(ControllerMethods)
CONTROLLER_SIDE = Protocol.of(FrontEndHello, FrontEndReport, Taken, answers=CONTROLLER_METHODS)
FRONT_END_SIDE = Protocol.of(Admitted, ClusterState, Figures, asks=CONTROLLER_METHODS)


# The state that the controller gives to its front ends, and gets back from them when it starts anew.


class ClusterStateLog:
    """Writes down what is decided, each time with a higher number.

    placement: None if adapters are not divided over instances.
    """

    def __init__(
        self, instance_registry: InstanceRegistry, routes: Routes, placement: PlacementController | None
    ) -> None:
        self._instance_registry = instance_registry
        self._routes = routes
        self._placement = placement
        self.state = ClusterState(number=0)
        self._table: dict[str, tuple[tuple[str, float], ...]] = {}
        self._table_version = 0

    def write(self) -> bool:
        """Bring `state` up to date; whether that changed it."""
        now = ClusterState(
            number=self.state.number,
            served=self._instance_registry.served,
            ranks=dict(self._routes.ranks),
            holdings=self._instance_registry.holdings,
        )
        router = self._routes.router
        if isinstance(router, PhiRouting) and self._placement is not None:
            if router.version != self._table_version:
                self._table = {
                    adapter: tuple((self._instance_registry.name_of(index), phi) for index, phi in row)
                    for adapter, row in router.table.items()
                }
                self._table_version = router.version
            demand = self._placement.demand
            now = replace(now, table=self._table, table_version=router.version, demand=demand)
        if now == self.state:
            return False
        self.state = replace(now, number=now.number + 1)
        return True

    def recover(self, state: ClusterState) -> None:
        """Go on from what a front end had from the controller before this one.

        Of each adapter the higher version counts, as `Served.joined` says; of tables the one with the higher
        number, with the demand that it was made for.  Numbers go on above all that were heard of.
        """
        self.state = replace(self.state, number=max(self.state.number, state.number))
        self._instance_registry.recover(state.served)
        self._routes.ranks.update(state.ranks)
        router = self._routes.router
        if isinstance(router, PhiRouting) and state.table_version > router.version:
            number_of = self._instance_registry.number_of
            router.swap(
                {name: [(number_of(one), phi) for one, phi in row] for name, row in state.table.items()}
            )
            router.version = state.table_version
            if self._placement is not None:
                self._placement.resume(state.demand)

    def count_above(self, state: ClusterState) -> None:
        """Give the state a higher number than one that came too late to be recovered."""
        self.state = replace(self.state, number=max(self.state.number, state.number) + 1)
