# SPDX-License-Identifier: Apache-2.0
"""Decisions for all front ends: adapters, placement, the LoRA Server's capacity."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import Address
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import AdapterError, ConfigError, MoeLoraError
from moe_lora.dist.cluster.adapter_calls import FLEET_CHANGES, FleetAdapters
from moe_lora.dist.cluster.instances import ABSENCE, InstanceRegistry
from moe_lora.dist.cluster.listener import CatchUp, InstanceListener
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.net.codec import verbs_of
from moe_lora.engine.client.client import CallableEngine
from moe_lora.engine.client.messages import Heartbeat

from .instance_control import InstanceControl
from .routes import Routes

if TYPE_CHECKING:
    from moe_lora.provision.online import DemandWindow

    from .capacity_controller import CapacityController
    from .cluster_state import Figures
    from .controller_link import ControllerLink
    from .migration_controller import MigrationController
    from .placement_controller import PlacementController
    from .served_registry import ServedRegistry

logger = logging.getLogger(__name__)
_LOOK_S = 0.01


class ClusterController:
    """Decides and executes calls.

    A single front end has the controller in the same process; several share a process behind a
    `FrontEndListener`.  placement: None: every instance has all adapters.  migration: None: no moves of
    requests.  provision: None: no watch on the load.  registry: None: adapters have paths only.  instances:
    None: no drains.
    """

    link = None

    def __init__(
        self,
        adapters: FleetAdapters,
        provision: CapacityController | None = None,
        registry: ServedRegistry | None = None,
        placement: PlacementController | None = None,
        migration: MigrationController | None = None,
        instances: InstanceControl | None = None,
    ) -> None:
        self.adapters, self.provision, self.registry = adapters, provision, registry
        self.placement, self.migration, self.instances = placement, migration, instances
        self._verbs = {**_verbs_of(instances), **_verbs_of(provision)}
        if registry is not None:
            from .served_registry import RegistryVerbs

            self._verbs |= verbs_of(RegistryVerbs(registry, adapters.devices))
        self.window: DemandWindow | None = None if provision is None else provision.window

    @property
    def figures(self) -> Figures:
        """The latest figures."""
        from .cluster_state import Figures

        placement = self.placement
        return Figures(
            num_tables=0 if placement is None else placement.version,
            num_copies=0 if placement is None else placement.num_copies,
            num_problems=0 if placement is None else placement.num_problems,
            quality=None if placement is None else placement.latest,
            outlook=None if self.provision is None else self.provision.latest,
        )

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """Run a verb by name (see `protocol`).  Raises the errors of the verb."""
        if verb in FLEET_CHANGES:
            return await self.adapters.call(verb, *args, **words)
        if verb not in self._verbs:
            raise ConfigError(f"this controller has no {verb}: its settings are not those of the front end")
        return await self._verbs[verb](*args, **words)

    async def leave(self) -> None:
        """End all pauses, so that requests finish before the end of the last front end."""
        try:
            await self.call("resume_requests", None)
        except MoeLoraError as error:
            logger.warning("pauses go on during the shutdown: %s", error)

    async def ready(self) -> None:
        """Return at once: the served adapters are known."""

    async def run(self) -> None:
        """Place adapters, move requests, watch the load and keep the pool, until cancelled."""
        parts = (self.placement, self.migration, self.provision, self.adapters.pool)
        await asyncio.gather(*(part.run() for part in parts if part is not None))


def _verbs_of(part: object | None) -> dict[str, Callable[..., Any]]:
    return {} if part is None else verbs_of(part)


@dataclass(frozen=True, kw_only=True)
class ServedFleet:
    """The fleet of a front end, with the front end's controller.  name: among several front ends."""

    controller: ClusterController | ControllerLink
    fleet: FleetClient
    instance_registry: InstanceRegistry
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ControlledFleet(ServedFleet):
    """A controller of this process, with the fleet."""

    controller: ClusterController
    routes: Routes
    catch_up: CatchUp

    async def start_together(self, num_instances: int, adapters: Sequence[tuple[str, str]]) -> None:
        """Return once this number of instances, with these start adapters, is in routing.

        Raises AdapterError if an instance lacks an adapter, except optional adapters of the registry.
        """
        registry, served = self.instance_registry, self.controller.registry
        optional = frozenset[str]() if served is None else served.optional
        while not (
            len(registry.instances) == num_instances and all(one.starting for one in registry.instances)
        ):
            await asyncio.sleep(_LOOK_S)
        if registry.pool is not None:
            clients = [one.starting for one in registry.instances]
            await registry.pool.fill(cast("list[CallableEngine]", clients), adapters, optional)
        self.catch_up.end_recovery()
        while len(registry.live) < num_instances:
            await asyncio.sleep(_LOOK_S)
        for instance in registry.live:
            if lost := sorted(instance.missing - optional):
                names, problem = ", ".join(lost), registry.problem(lost[0])
                raise AdapterError(
                    f"instance {instance.name} can't serve {names}: {problem}; let nothing write to the "
                    "folders of adapters while the server starts"
                )


def _capacity_controller(cluster: ClusterConfig, fleet: FleetClient) -> CapacityController | None:
    if cluster.provisioning is None:
        return None
    from .capacity_controller import make_capacity_controller

    return make_capacity_controller(cluster, fleet)


def _migration_controller(
    cluster: ClusterConfig, routes: Routes, instance_registry: InstanceRegistry
) -> MigrationController | None:
    if cluster.front_end.migration == "off":
        return None
    from .migration_controller import make_migration_controller

    return make_migration_controller(cluster, routes, instance_registry)


@asynccontextmanager
async def controlled_fleet(
    cluster: ClusterConfig,
    routes: Routes,
    setting: str,
    address: Address,
    *,
    advice: str = ABSENCE,
    registry: ServedRegistry | None = None,
    recovery_s: float | None = None,
    on_give_up: Callable[[str], None] = lambda name: None,
) -> AsyncIterator[ControlledFleet]:
    """A controller for the instances that dial the address, until the context ends.

    setting: names the address in errors.  advice: see `InstanceRegistry`.  registry: with adapters among
    cluster.engine's.  recovery_s: see `CatchUp`.  on_give_up: see `InstanceListener`.  Raises ConfigError
    for errors known at start.
    """
    config = cluster.engine
    pool = None
    if config.pool is not None:
        from moe_lora.dist.cluster.pool.directory import PoolDirectory

        pool = PoolDirectory(config.pool.replicas)
    heartbeat = Heartbeat.of(cluster.front_end)
    instance_registry = InstanceRegistry((), config.adapters, advice, heartbeat, pool)
    adapters = FleetAdapters(instance_registry, routes.ranks)
    fleet = FleetClient(instance_registry, routes, WallClock(), adapters.call, seed=config.seed)
    controller = ClusterController(
        adapters,
        _capacity_controller(cluster, fleet),
        registry,
        routes.placement(fleet, adapters.pool),
        _migration_controller(cluster, routes, instance_registry),
        InstanceControl(instance_registry, cluster.front_end.drain_s),
    )
    catch_up = CatchUp(instance_registry, recovery_s)
    listener = InstanceListener(instance_registry, catch_up, on_give_up, cluster.front_end.max_unread_steps)
    keys = None
    if not cluster.on_one_host:
        from moe_lora.dist.net.keys import keys_of

        keys = keys_of(cluster)
    async with listener.open(setting, address, keys):
        try:
            yield ControlledFleet(
                controller=controller,
                fleet=fleet,
                instance_registry=instance_registry,
                routes=routes,
                catch_up=catch_up,
            )
        finally:
            await fleet.close()
