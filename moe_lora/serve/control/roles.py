"""The controller and the front ends that it directs, wired from the cluster's file."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from moe_lora.config import CONTROLLER, ONE_FRONT_END, ProvisionConfig, parse_host_port
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import ConfigError
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
from moe_lora.serve.server import run_server

from .book import StateBook
from .directed import DirectedFleet, DirectedProvision, DirectedRegistry, DirectedRouting
from .director import Decisions
from .link import ControllerLink
from .server import run_controller

if TYPE_CHECKING:
    from moe_lora.engine.text import Tokenizer

ABSENCE = "none has dialled in at {}:{} or all have left; start one, or send the request again in a while"


def serve_controller(cluster: ClusterConfig) -> None:
    """Decide for the front ends of a cluster until told to stop.

    Raises ConfigError, RegistryError or AdapterError for what can be known at start.
    """
    if cluster.controller is None:
        raise ConfigError(
            "the file has no controller section, so there is none to start; add one with address and "
            "engines_address"
        )
    host, port = parse_host_port("controller.address", cluster.controller.address)
    place, key, config = cluster.doors()[CONTROLLER], cluster.secret(), cluster.engine
    with opened_registry(cluster.registry, config, cluster.served_model_name) as (config, registry):
        pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
        roster = Roster((), config.adapters, ABSENCE.format(*place), Heartbeat.of(cluster.front_end), pool)
        routes = make_routes(cluster.front_end, config.max_num_seqs, config.lora_kernel)
        fleet = FleetClient(roster, routes.router, WallClock(), meter=routes.meter, ranks=routes.ranks)
        placement = routes.placement(fleet)
        recovery = Recovery(roster, None)
        door = Door(*place, key, roster, CatchUp(roster, recovery))
        decisions = Decisions(
            fleet=fleet,
            meter=routes.meter,
            placement=placement,
            provision=make_controller(cluster.provision, fleet, cluster.instance().lora_server),
            registry=registry,
        )
        try:
            run_controller(
                decisions,
                StateBook(roster, routes, placement),
                recovery,
                host=host,
                port=port,
                key=key,
                front_ends=cluster.front_ends or (ONE_FRONT_END,),
            )
        finally:
            door.close()
            asyncio.run(fleet.close())


def serve_directed(
    cluster: ClusterConfig, name: str, tokenizer: Tokenizer | None, sock: socket.socket
) -> None:
    """Serve HTTP as the front end of that name, which a controller directs, until told to stop.

    sock: from `serve.server.bind`.  Raises ConfigError for what can be known at start.
    """
    assert cluster.controller is not None
    place, key, config = cluster.doors()[name], cluster.secret(), cluster.engine
    link = ControllerLink(*parse_host_port("controller.address", cluster.controller.address), key, name)
    advice, heartbeat = ABSENCE.format(*place), Heartbeat.of(cluster.front_end)
    roster = DirectedRoster((), config.adapters, advice, heartbeat)
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
        cors_origins=cluster.front_end.cors_origins,
    )
    door = Door(*place, key, roster, AsItIs(roster))
    try:
        run_server(frontend, sock, cluster.front_end.drain_s)
    finally:
        door.close()
        asyncio.run(fleet.close())
