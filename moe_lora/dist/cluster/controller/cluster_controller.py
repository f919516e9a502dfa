# SPDX-License-Identifier: Apache-2.0
"""Decisions for all front ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import AdapterError, ConfigError, MoeLoraError
from moe_lora.dist.cluster.adapter_calls import FLEET_CHANGES, FleetAdapters
from moe_lora.dist.cluster.instances import ABSENCE, InstanceRegistry
from moe_lora.dist.cluster.listener import RECOVERY_S, CatchUp, InstanceListener
from moe_lora.dist.cluster.routing_client import FleetClient, make_client
from moe_lora.dist.net.codec import verb, verbs_of
from moe_lora.engine.client.messages import Alias, AliasChange, Heartbeat

from .instance_control import InstanceControl
from .routes import Routes, make_routes

if TYPE_CHECKING:
    from .capacity_controller import CapacityController
    from .cluster_state import Figures
    from .migration_controller import MigrationController
    from .placement_controller import PlacementController
    from .served_registry import ServedRegistry

logger = logging.getLogger(__name__)
_LOOK_S = 0.01


class ClusterController:
    """Decides and executes calls, in a single front end or behind a `FrontEndListener`.

    placement None: every instance has all adapters.  provision None: no watch on the load.
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
        self._verbs = {**verbs_of(self), **_verbs_of(instances), **_verbs_of(provision)}
        if registry is not None:
            from .served_registry import RegistryVerbs

            self._verbs |= verbs_of(RegistryVerbs(registry, adapters.devices))
        self.window = None if provision is None else provision.window
        if provision is not None:
            provision.num_known = lambda: len(adapters.instance_registry.instances)

    @property
    def figures(self) -> Figures:
        from .cluster_state import Figures

        placement = self.placement
        return Figures(
            num_tables=0 if placement is None else placement.version,
            num_copies=0 if placement is None else placement.num_copies,
            num_problems=0 if placement is None else placement.num_problems,
            quality=None if placement is None else placement.latest,
            outlook=None if self.provision is None else self.provision.latest,
        )

    @verb
    async def change_alias(self, name: str, change: AliasChange) -> tuple[Alias, bool]:
        return await self.adapters.rollouts(self.registry).change(name, change)

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """Run a verb by name (see `protocol`).  Raises the verb's errors."""
        if verb in FLEET_CHANGES:
            return await self.adapters.call(verb, *args, **words)
        if verb not in self._verbs:
            raise ConfigError(f"this controller has no {verb}: its settings are not those of the front end")
        return await self._verbs[verb](*args, **words)

    async def leave(self) -> None:
        """End all pauses, so that requests finish."""
        try:
            await self.call("resume_requests", None)
        except MoeLoraError as error:
            logger.warning("pauses go on during the shutdown: %s", error)

    async def ready(self) -> None:
        """Return at once."""

    async def run(self) -> None:
        """Run all parts until cancelled."""
        parts = (self.placement, self.migration, self.provision, self.adapters.pool)
        runs = [part.run() for part in parts if part is not None]
        if self.registry is not None and self.registry.aliases:
            runs.append(self.adapters.rollouts(self.registry).pin_all())
        await asyncio.gather(*runs)


def _verbs_of(part: object | None) -> dict[str, Callable[..., Any]]:
    return {} if part is None else verbs_of(part)


@dataclass(frozen=True, kw_only=True)
class ControlledFleet:
    """A front end's fleet, with its own controller."""

    controller: ClusterController
    fleet: FleetClient
    instance_registry: InstanceRegistry
    routes: Routes
    catch_up: CatchUp
    name: str | None = None

    async def start_together(self, num_instances: int, adapters: Sequence[tuple[str, str]]) -> None:
        """Return once this number of instances, with the start adapters, is in routing.

        Raises AdapterError if an instance lacks an adapter, unless optional.
        """
        registry, served = self.instance_registry, self.controller.registry
        optional = frozenset[str]() if served is None else served.optional
        while not (
            len(registry.instances) == num_instances and all(one.starting for one in registry.instances)
        ):
            await asyncio.sleep(_LOOK_S)
        if registry.pool is not None:
            clients: list[Any] = [one.starting for one in registry.instances]
            await registry.pool.fill(clients, adapters, optional)
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


def _instance_control(cluster: ClusterConfig, routes: Routes, registry: InstanceRegistry) -> InstanceControl:
    config, by_adapter = cluster.front_end, routes.by_adapter
    return InstanceControl(registry, config.drain_s, config.prefill_instances, by_adapter=by_adapter)


def _migration_controller(
    cluster: ClusterConfig, routes: Routes, instance_registry: InstanceRegistry
) -> MigrationController | None:
    if cluster.front_end.migration == "off":
        return None
    from .migration_controller import make_migration_controller

    return make_migration_controller(cluster, routes, instance_registry)


def dialled_fleet(
    cluster: ClusterConfig, registry: ServedRegistry | None
) -> AbstractAsyncContextManager[ControlledFleet]:
    """The fleet of a single front end, dialled by instances."""
    setting = "front_end.engines_address"
    address = parse_address(setting, cluster.engines_address())
    routes = make_routes(cluster)
    return controlled_fleet(cluster, routes, setting, address, registry=registry, recovery_s=RECOVERY_S)


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

    setting: names the address in errors.  Raises ConfigError for errors known at start.
    """
    config = cluster.engine
    pool = None
    if config.pool is not None:
        from moe_lora.dist.cluster.pool.directory import PoolDirectory

        pool = PoolDirectory(config.pool.replicas)
    heartbeat = Heartbeat.of(cluster.front_end)
    instance_registry = InstanceRegistry((), config.adapters, advice, heartbeat, pool)
    if registry is not None:
        instance_registry.aliases |= registry.aliases
    adapters = FleetAdapters(instance_registry, routes.ranks)
    fleet = make_client(cluster, instance_registry, routes, adapters.call)
    controller = ClusterController(
        adapters,
        _capacity_controller(cluster, fleet),
        registry,
        routes.placement(fleet, adapters.pool),
        _migration_controller(cluster, routes, instance_registry),
        _instance_control(cluster, routes, instance_registry),
    )
    if cluster.has_resolver:
        from moe_lora.dist.cluster.resolving import attach_resolver

        attach_resolver(fleet, cluster, controller.call)
    catch_up = CatchUp(instance_registry, recovery_s)
    listener = InstanceListener(
        instance_registry, catch_up, on_give_up, cluster.front_end.max_unread_steps, cluster.epoch
    )
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
