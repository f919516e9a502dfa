"""The controller and the front ends that it directs, wired from the cluster's file."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_lora.config import CONTROLLER, ONE_FRONT_END, ProvisionConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import Address, parse_address
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.controller.capacity_controller import make_controller
from moe_lora.dist.cluster.controller.cluster_controller import ClusterController, Decisions, run_controller
from moe_lora.dist.cluster.controller.cluster_state import ClusterStateLog
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.directed import (
    DirectedFleet,
    DirectedInstanceRegistry,
    DirectedProvision,
    DirectedRegistry,
    DirectedRouting,
)
from moe_lora.dist.cluster.controller.placement_controller import Routes, make_routes
from moe_lora.dist.cluster.controller.served_registry import opened_registry
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.listener import RECOVERY_S, AsItIs, CatchUp, InstanceListener, Recovery
from moe_lora.dist.cluster.pool.directory import PoolDirectory
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.net.keys import keys_of
from moe_lora.engine.client.heartbeat import Heartbeat

from .frontend import Frontend
from .server import serve_forever

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer

ABSENCE = "none has dialled in at {} or all have left; start one, or send the request again in a while"


@dataclass(frozen=True)
class Control:
    """What decides, and what it decides about.  recovery: of its start."""

    decisions: Decisions
    instance_registry: InstanceRegistry
    routes: Routes
    recovery: Recovery


def only_front_end(
    decisions: Decisions, tokenizer: Tokenizer | None, model_name: str, cors_origins: Sequence[str]
) -> Frontend:
    """The only front end, which decides beside its requests."""
    parts = (decisions.provision, decisions.placement, decisions.fleet.pool)
    return Frontend(
        client=decisions.fleet,
        tokenizer=tokenizer,
        model_name=model_name,
        controller=decisions.provision,
        placement=decisions.placement,
        registry=decisions.registry,
        tasks=[one for one in parts if one is not None],
        cors_origins=cors_origins,
    )


@asynccontextmanager
async def controlling(
    cluster: ClusterConfig, setting: str, address: Address, recovery_s: float | None
) -> AsyncIterator[Control]:
    """Decides for the instances that dial that address, until the context ends; recovery_s: see `Recovery`.

    Raises ConfigError, RegistryError or AdapterError for what can be known at start.
    """
    with opened_registry(cluster.registry, cluster.engine, cluster.served_model_name) as (config, registry):
        pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
        heartbeat = Heartbeat.of(cluster.front_end)
        instance_registry = InstanceRegistry((), config.adapters, ABSENCE.format(address), heartbeat, pool)
        routes = make_routes(cluster.front_end, config.max_num_seqs, config.lora_kernel)
        fleet = FleetClient(
            instance_registry, routes.router, WallClock(), meter=routes.meter, ranks=routes.ranks
        )
        recovery = Recovery(instance_registry, recovery_s)
        decisions = Decisions(
            fleet=fleet,
            meter=routes.meter,
            placement=routes.placement(fleet),
            provision=make_controller(cluster.provision, fleet, cluster.instance().lora_server),
            registry=registry,
        )
        async with InstanceListener(instance_registry, CatchUp(instance_registry, recovery)).open(
            setting, address, keys_of(cluster)
        ):
            try:
                yield Control(decisions, instance_registry, routes, recovery)
            finally:
                await fleet.close()


async def serve_controller(cluster: ClusterConfig) -> None:
    """Decide for the front ends of a cluster until told to stop.  Raises as `controlling`."""
    if cluster.controller is None:
        raise ConfigError(
            "the file has no controller section, so there is none to start; add one with address and "
            "engines_address"
        )
    address = parse_address("controller.address", cluster.controller.address)
    place = cluster.doors()[CONTROLLER]
    async with controlling(cluster, "controller.engines_address", place, None) as control:
        state_log = ClusterStateLog(control.instance_registry, control.routes, control.decisions.placement)
        front_ends = cluster.front_ends or (ONE_FRONT_END,)
        cluster_controller = ClusterController(control.decisions, state_log, control.recovery, front_ends)
        await run_controller(cluster_controller, address, keys_of(cluster))


async def serve_deciding(cluster: ClusterConfig, tokenizer: Tokenizer | None, sock: socket.socket) -> None:
    """Serve HTTP as the only front end, which decides too, until told to stop.  Raises as `controlling`."""
    setting = "front_end.engines_address"
    address = parse_address(setting, cluster.engines_address())
    async with controlling(cluster, setting, address, RECOVERY_S) as control:
        settings = cluster.front_end
        frontend = only_front_end(
            control.decisions, tokenizer, cluster.served_model_name, settings.cors_origins
        )
        await serve_forever(frontend, sock, settings.drain_s)


async def serve_directed(
    cluster: ClusterConfig, name: str, tokenizer: Tokenizer | None, sock: socket.socket
) -> None:
    """Serve HTTP as the front end of that name, which a controller directs, until told to stop.

    sock: from `serve.server.bind`.  Raises ConfigError for what can be known at start.
    """
    assert cluster.controller is not None
    place, keys, config = cluster.doors()[name], keys_of(cluster), cluster.engine
    link = ControllerLink(parse_address("controller.address", cluster.controller.address), keys, name)
    instance_registry = DirectedInstanceRegistry(
        (), config.adapters, ABSENCE.format(place), Heartbeat.of(cluster.front_end)
    )
    routes = make_routes(cluster.front_end, config.max_num_seqs, config.lora_kernel)
    fleet = DirectedFleet(instance_registry, routes, link, WallClock())
    has_server = cluster.lora_server is not None
    provision = DirectedProvision(cluster.provision or ProvisionConfig(), has_server, link)
    link.follower = routing = DirectedRouting(instance_registry, routes, provision)
    frontend = Frontend(
        client=fleet,
        tokenizer=tokenizer,
        model_name=cluster.served_model_name,
        controller=provision if has_server or cluster.provision is not None else None,
        placement=routing if cluster.front_end.placement is not None else None,
        registry=None if cluster.registry is None else DirectedRegistry(link),
        link=link,
        tasks=(link,),
        ready=routing.ready,
        cors_origins=cluster.front_end.cors_origins,
    )
    async with InstanceListener(instance_registry, AsItIs(instance_registry)).open(
        f"front_ends.{name}.engines_address", place, keys
    ):
        try:
            await serve_forever(frontend, sock, cluster.front_end.drain_s)
        finally:
            await fleet.close()
