"""The controller and the front ends that it directs, wired from the cluster's file."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from moe_lora.core.clock import WallClock
from moe_lora.core.config import ProvisionConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster import ClusterConfig
from moe_lora.dist.front_ends import CONTROLLER, ONE_FRONT_END
from moe_lora.dist.net.connection import parse_address
from moe_lora.engine.directed_roster import DirectedRoster
from moe_lora.engine.door import Door
from moe_lora.engine.entry import AsItIs, CatchUp, Recovery
from moe_lora.engine.fleet import FleetClient
from moe_lora.engine.heartbeat import Heartbeat
from moe_lora.engine.pool_directory import PoolDirectory
from moe_lora.engine.roster import Roster
from moe_lora.serve.controller import make_controller
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.routes import make_routes
from moe_lora.serve.served_registry import opened_registry
from moe_lora.serve.server import serve_forever

from .book import StateBook
from .directed import DirectedFleet, DirectedProvision, DirectedRegistry, DirectedRouting
from .director import Decisions, Director
from .link import ControllerLink
from .server import run_controller

if TYPE_CHECKING:
    from moe_lora.engine.text import Tokenizer

ABSENCE = "none has dialled in at {} or all have left; start one, or send the request again in a while"


async def serve_controller(cluster: ClusterConfig) -> None:
    """Decide for the front ends of a cluster until told to stop.

    Raises ConfigError, RegistryError or AdapterError for what can be known at start.
    """
    if cluster.controller is None:
        raise ConfigError(
            "the file has no controller section, so there is none to start; add one with address and "
            "engines_address"
        )
    address = parse_address("controller.address", cluster.controller.address)
    place, keys, config = cluster.doors()[CONTROLLER], cluster.keys(), cluster.engine
    with opened_registry(cluster.registry, config, cluster.served_model_name) as (config, registry):
        pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
        roster = Roster((), config.adapters, ABSENCE.format(place), Heartbeat.of(cluster.front_end), pool)
        routes = make_routes(cluster.front_end, config.max_num_seqs, config.lora_kernel)
        fleet = FleetClient(roster, routes.router, WallClock(), meter=routes.meter, ranks=routes.ranks)
        placement = routes.placement(fleet)
        recovery = Recovery(roster, None)
        decisions = Decisions(
            fleet=fleet,
            meter=routes.meter,
            placement=placement,
            provision=make_controller(cluster.provision, fleet, cluster.instance().lora_server),
            registry=registry,
        )
        book = StateBook(roster, routes, placement)
        director = Director(decisions, book, recovery, cluster.front_ends or (ONE_FRONT_END,))
        door = Door(roster, CatchUp(roster, recovery))
        async with door.open("controller.engines_address", place, keys):
            try:
                await run_controller(director, address, keys)
            finally:
                await fleet.close()


async def serve_directed(
    cluster: ClusterConfig, name: str, tokenizer: Tokenizer | None, sock: socket.socket
) -> None:
    """Serve HTTP as the front end of that name, which a controller directs, until told to stop.

    sock: from `serve.server.bind`.  Raises ConfigError for what can be known at start.
    """
    assert cluster.controller is not None
    place, keys, config = cluster.doors()[name], cluster.keys(), cluster.engine
    link = ControllerLink(parse_address("controller.address", cluster.controller.address), keys, name)
    roster = DirectedRoster((), config.adapters, ABSENCE.format(place), Heartbeat.of(cluster.front_end))
    routes = make_routes(cluster.front_end, config.max_num_seqs, config.lora_kernel)
    fleet = DirectedFleet(roster, routes, link, WallClock())
    has_server = cluster.lora_server is not None
    provision = DirectedProvision(cluster.provision or ProvisionConfig(), has_server, link)
    link.follower = routing = DirectedRouting(roster, routes, provision)
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
    )
    async with Door(roster, AsItIs(roster)).open(f"front_ends.{name}.engines_address", place, keys):
        try:
            await serve_forever(frontend, sock)
        finally:
            await fleet.close()
