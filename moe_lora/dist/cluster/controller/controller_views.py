"""What a front end must know of its controllers, whether they run beside its requests or elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from moe_lora.adapters.registry.registry import RegisteredAdapter
from moe_lora.config import ProvisionConfig
from moe_lora.core.request import RequestTiming
from moe_lora.dist.lora_server.protocol.control_messages import ServerState
from moe_lora.provision.online import Outlook
from moe_lora.provision.placement.placement_problem import PlacementQuality


class VisitView(Protocol):
    """A request in the window of the load on adapters (see `provision.online.Visit`)."""

    def start(self) -> None: ...

    def refuse(self) -> None: ...

    def end(self, timing: RequestTiming | None) -> None: ...


class WindowView(Protocol):
    def begin(self, adapter: str) -> VisitView: ...


class ProvisionView(Protocol):
    """See `dist.cluster.controller.capacity_controller.CapacityController`."""

    @property
    def config(self) -> ProvisionConfig: ...

    @property
    def window(self) -> WindowView: ...

    @property
    def latest(self) -> Outlook | None: ...

    @property
    def has_server(self) -> bool: ...

    async def server_state(self) -> ServerState | None: ...

    async def resize(self, capacity: int) -> ServerState: ...


class RegistryView(Protocol):
    """See `dist.cluster.controller.served_registry.ServedRegistry`."""

    async def base(self) -> str: ...

    async def resolve(self, name: str) -> RegisteredAdapter: ...

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any: ...


class PlacementView(Protocol):
    """See `dist.cluster.controller.placement_controller.PlacementController`."""

    @property
    def version(self) -> int: ...

    @property
    def num_copies(self) -> int: ...

    @property
    def num_problems(self) -> int: ...

    @property
    def latest(self) -> PlacementQuality | None: ...

    @property
    def has_points(self) -> bool: ...
