# SPDX-License-Identifier: Apache-2.0
"""A controller and front ends in one event loop, over real connections; engines that count stand behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from tempfile import TemporaryDirectory

from moe_lora.config import FrontEndConfig, ProvisionConfig
from moe_lora.core.address import Address
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.capacity_controller import CapacityController
from moe_lora.dist.cluster.controller.cluster_controller import ClusterController, ControlledFleet
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.front_end_listener import FrontEndListener
from moe_lora.dist.cluster.controller.instance_control import InstanceControl
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.listener import CatchUp
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.net.keys import Keys
from tests.dist.cluster.fleet_parts import CountingEngine, cluster_config
from tests.patience import PATIENCE_S
from tests.virtual_clock import VirtualClock

START = (("a", "places/a"), ("b", "places/b"))
NAMES = ("one", "two")


def engines(num_engines: int = 2) -> list[CountingEngine]:
    return [CountingEngine(adapters=dict(START)) for _ in range(num_engines)]


async def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


class ControllerSide:
    """A controller's process, but for its own listener of instances.  clock: of demand and placement."""

    def __init__(
        self,
        fleet_engines: list[CountingEngine],
        placement: str | None = None,
        registry: ServedRegistry | None = None,
        epoch: int = 0,
    ) -> None:
        self.clock = VirtualClock()
        self.instance_registry = InstanceRegistry(fleet_engines, START)
        self.routes = make_routes(
            cluster_config(FrontEndConfig(placement=placement, placement_interval_s=3600.0))
        )
        adapters = FleetAdapters(self.instance_registry, self.routes.ranks)
        self.fleet = FleetClient(self.instance_registry, self.routes, self.clock, adapters.call)
        self.placement = self.routes.placement(self.fleet)
        self.provision = CapacityController(ProvisionConfig(), self.fleet, None, self.clock)
        self.controller = ClusterController(
            *(adapters, self.provision, registry, self.placement),
            instances=InstanceControl(self.instance_registry, 20.0),
        )
        controlled = ControlledFleet(
            controller=self.controller,
            fleet=self.fleet,
            instance_registry=self.instance_registry,
            routes=self.routes,
            catch_up=CatchUp(self.instance_registry, None),
        )
        self.listener = FrontEndListener(controlled, NAMES, epoch)

    async def start(self, address: Address, keys: Keys | None = None) -> Address:
        """Listen there."""
        self._stack = AsyncExitStack()
        place = await self._stack.enter_async_context(self.listener.open(address, keys))
        self.task = asyncio.create_task(self.listener.run())
        return place

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._stack.aclose()


class FrontEndSide:
    """A front end's process, but for HTTP and its listener."""

    def __init__(
        self,
        name: str,
        address: Address | Mapping[str, Address],
        fleet_engines: list[CountingEngine],
        placement: str | None = None,
        keys: Keys | None = None,
    ):
        self.instance_registry = InstanceRegistry(fleet_engines, START)
        self.routes = make_routes(cluster_config(FrontEndConfig(placement=placement)))
        places = {"controller": address} if isinstance(address, Address) else address
        self.link = ControllerLink(places, keys, name, self.instance_registry, self.routes)
        self.fleet = FleetClient(self.instance_registry, self.routes, VirtualClock(), self.link.call)
        self.task = asyncio.create_task(self.link.run())

    async def ask(self, request_id: str, adapter: str | None = None, max_tokens: int = 4) -> list[int]:
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=(0, 1),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            adapter=adapter,
        )
        return [token async for output in self.fleet.generate(request) for token in output.token_ids]

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Cluster:
    """One controller and two front ends over two engines."""

    def __init__(self, placement: str | None = None, registry: ServedRegistry | None = None) -> None:
        self.placement = placement
        self.registry = registry
        self.engines = engines()

    async def __aenter__(self) -> Cluster:
        self._folder = TemporaryDirectory(prefix="moe_lora-")
        self.address = Address(path=f"{self._folder.name}/controller")
        self.controller = ControllerSide(self.engines, self.placement, self.registry)
        await self.controller.start(self.address)
        self.front_ends = [FrontEndSide(name, self.address, self.engines, self.placement) for name in NAMES]
        await until(lambda: all(one.link.state is not None for one in self.front_ends))
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self.front_ends:
            await one.stop()
        await self.controller.stop()
        self._folder.cleanup()

    async def restart_controller(self) -> None:
        """Another process, that knows what the file says."""
        self.controller = ControllerSide(self.engines, self.placement)
        await self.controller.start(self.address)
        await until(lambda: all(one.link.up for one in self.front_ends))
