"""The composition root: settings in, wired processes out."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.token_meter import TokenMeter
from moe_lora.engine.client import EngineClient
from moe_lora.policies.routing import Router

if TYPE_CHECKING:
    from moe_lora.engine.heartbeat import Heartbeat
    from moe_lora.engine.pool_directory import PoolDirectory
    from moe_lora.engine.process import ProcessClient
    from moe_lora.engine.text import Tokenizer
    from moe_lora.serve.controller import Controller
    from moe_lora.serve.frontend import Frontend
    from moe_lora.serve.placement import PlacementController
    from moe_lora.serve.routes import Routes
    from moe_lora.serve.served_registry import ServedRegistry


def serve(cluster: ClusterConfig) -> None:
    """Start the cluster's instances as processes of this host and serve them over HTTP until told to stop.

    cluster.engine.num_threads counts for each instance.  Of the cluster's addresses only that of HTTP counts.
    Raises ConfigError, RegistryError or AdapterError for what can be known at start.
    """
    from moe_lora.engine.heartbeat import Heartbeat
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.serve.controller import make_controller
    from moe_lora.serve.served_registry import opened_registry
    from moe_lora.serve.server import bind, run_server

    routes, config, name = _checked_routes(cluster), cluster.engine, cluster.served_model_name
    tokenizer, front_end = load_tokenizer(config.model_dir), cluster.front_end
    with (
        bind(front_end.host, front_end.port) as sock,
        opened_registry(cluster.registry, config, name) as (config, served),
        lora_server_processes(config, cluster.lora_server) as joined,
        engine_processes(
            joined,
            routes.router,
            meter=routes.meter,
            ranks=routes.ranks,
            heartbeat=Heartbeat.of(routes.config),
        ) as client,
    ):
        controller = make_controller(cluster.provision, client, joined.lora_server)
        placement = routes.placement(client)
        frontend = _frontend(client, tokenizer, name, controller, placement, served, front_end.cors_origins)
        run_server(frontend, sock, front_end.drain_s)


def serve_controller(cluster: ClusterConfig) -> None:
    """Decide for the front ends of a cluster (see `serve.control`) until told to stop.

    Raises ConfigError, RegistryError or AdapterError for what can be known at start.
    """
    from moe_lora.serve.control import roles

    roles.serve_controller(cluster)


def serve_host(cluster: ClusterConfig, num_front_ends: int) -> int:
    """Start a controller, front ends on one port, instances and a LoRA Server as processes of this host, and
    keep them running until told to stop; the exit code.

    Of the cluster's addresses only that of HTTP counts.  Raises ConfigError for what can be known at start.
    """
    from moe_lora.core.state_folder import run_folder
    from moe_lora.dist.host_roles import run_roles
    from moe_lora.dist.one_host import cluster_file, on_loopback, roles_of
    from moe_lora.engine.process import usable_cores
    from moe_lora.engine.shares import thread_share
    from moe_lora.serve.server import bind

    # What can't work is said here, once, and not by each process.
    _checked_routes(cluster)
    thread_share(cluster.engine.num_threads, cluster.engine.num_instances, usable_cores())
    with (
        bind(cluster.front_end.host, cluster.front_end.port) as sock,
        run_folder(cluster.engine.state_dir) as folder,
        lora_server_processes(cluster.engine, cluster.lora_server) as joined,
    ):
        cluster = on_loopback(cluster, num_front_ends, joined.lora_server)
        kept = replace(cluster.engine, contents_dir=str(folder / "contents"))
        with cluster_file(replace(cluster, engine=kept)) as file:
            return 0 if run_roles(roles_of(cluster, file, sock.fileno()), cluster.front_end.drain_s) else 1


def serve_front_end(cluster: ClusterConfig, name: str | None = None, listen_fd: int | None = None) -> None:
    """Serve over HTTP what instances compute that dial in (see `engine.door`), until told to stop.

    name: of one of several.  listen_fd: a bound socket that the process inherits; None: it makes one.
    Raises ConfigError for what can be known at start.
    """
    from moe_lora.config import ONE_FRONT_END
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.serve.control.roles import serve_directed
    from moe_lora.serve.server import bind

    name = name or ONE_FRONT_END
    front_end = cluster.front_end_named(name)
    tokenizer = load_tokenizer(cluster.engine.model_dir)
    with (
        bind(front_end.host, front_end.port) if listen_fd is None else socket.socket(fileno=listen_fd) as sock
    ):
        if cluster.controller is None:
            _serve_deciding(cluster, tokenizer, sock)
        else:
            serve_directed(cluster, name, tokenizer, sock)


def _serve_deciding(cluster: ClusterConfig, tokenizer: Tokenizer | None, sock: socket.socket) -> None:
    """Serve as the only front end, which decides everything."""
    from moe_lora.config import parse_host_port
    from moe_lora.core.clock import WallClock
    from moe_lora.engine.door import Door
    from moe_lora.engine.entry import CatchUp, Recovery
    from moe_lora.engine.fleet import FleetClient
    from moe_lora.engine.heartbeat import Heartbeat
    from moe_lora.engine.pool_directory import PoolDirectory
    from moe_lora.engine.roster import Roster
    from moe_lora.serve.control.roles import ABSENCE
    from moe_lora.serve.controller import make_controller
    from moe_lora.serve.routes import make_routes
    from moe_lora.serve.served_registry import opened_registry
    from moe_lora.serve.server import run_server

    config = cluster.engine
    address, key = cluster.engines_address(), cluster.secret()
    place = parse_host_port("front_end.engines_address", address)
    name = cluster.served_model_name
    with opened_registry(cluster.registry, config, name) as (config, served):
        pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
        roster = Roster((), config.adapters, ABSENCE.format(*place), Heartbeat.of(cluster.front_end), pool)
        routes = make_routes(cluster.front_end, config.max_num_seqs, config.lora_kernel)
        fleet = FleetClient(roster, routes.router, WallClock(), meter=routes.meter, ranks=routes.ranks)
        entry = CatchUp(roster, Recovery(roster))
        door = Door(*place, key, roster, entry)
        try:
            controller = make_controller(cluster.provision, fleet, cluster.instance().lora_server)
            placement, origins = routes.placement(fleet), cluster.front_end.cors_origins
            frontend = _frontend(fleet, tokenizer, name, controller, placement, served, origins)
            run_server(frontend, sock, cluster.front_end.drain_s)
        finally:
            door.close()
            asyncio.run(fleet.close())


def _checked_routes(cluster: ClusterConfig) -> Routes:
    """What routes the requests to instances of this host.  Raises ConfigError."""
    from moe_lora.engine.shares import check_pool
    from moe_lora.serve.routes import make_routes

    routes = make_routes(cluster.front_end, cluster.engine.max_num_seqs, cluster.engine.lora_kernel)
    if cluster.front_end.placement is not None and cluster.engine.num_instances < 2:
        raise ConfigError(
            "a placement is over several instances; give --instances 2 or more, or leave it out"
        )
    check_pool(cluster.engine)
    return routes


def _frontend(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    model_name: str,
    controller: Controller | None,
    placement: PlacementController | None,
    registry: ServedRegistry | None,
    cors_origins: Sequence[str],
) -> Frontend:
    """A front end that decides for itself: its controllers run beside its requests."""
    from moe_lora.engine.fleet import FleetClient
    from moe_lora.serve.frontend import Frontend

    pool = client.pool if isinstance(client, FleetClient) else None
    return Frontend(
        client=client,
        tokenizer=tokenizer,
        model_name=model_name,
        controller=controller,
        placement=placement,
        registry=registry,
        tasks=[one for one in (controller, placement, pool) if one is not None],
        cors_origins=cors_origins,
    )


@contextmanager
def engine_processes(
    config: EngineConfig,
    routing: str | Router = "least_outstanding",
    *,
    meter: TokenMeter | None = None,
    ranks: dict[str, int] | None = None,
    heartbeat: Heartbeat | None = None,
) -> Iterator[EngineClient]:
    """Engine processes, ended with the context: one, or several that stand in for each other.

    Several are restarted when they end; one is not.  routing: a router, or the name of one in
    `policies.routers.ROUTERS`.  meter, ranks: see `FleetClient`.  heartbeat: when one of several is silent.
    """
    from moe_lora.engine.attendance import LoneAttendance
    from moe_lora.engine.heartbeat import Heartbeat
    from moe_lora.engine.process import ProcessClient, usable_cores
    from moe_lora.engine.shares import thread_share

    count = config.num_instances
    config = replace(config, num_threads=thread_share(config.num_threads, count, usable_cores()))
    if count == 1:
        beats = heartbeat or Heartbeat()
        single = ProcessClient(config, heartbeat_s=beats.interval_s)
        single.attendance = LoneAttendance(single, beats)
        single.attendance.start()
        try:
            yield single
        finally:
            single.shut_down()
        return

    from moe_lora.core.state_folder import run_folder

    with (
        run_folder(config.state_dir) as folder,
        _several(config, routing, meter, ranks, heartbeat, folder) as fleet,
    ):
        yield fleet


@contextmanager
def _several(
    config: EngineConfig,
    routing: str | Router,
    meter: TokenMeter | None,
    ranks: dict[str, int] | None,
    heartbeat: Heartbeat | None,
    folder: Path,
) -> Iterator[EngineClient]:
    """Instances that stand in for each other; folder: where the contents of adapters are kept."""
    from moe_lora.core.clock import WallClock
    from moe_lora.engine.fleet import FleetClient
    from moe_lora.engine.heartbeat import Heartbeat
    from moe_lora.engine.pool_directory import PoolDirectory
    from moe_lora.engine.process import ProcessClient, start_processes
    from moe_lora.engine.roster import Roster
    from moe_lora.engine.shares import instance_config
    from moe_lora.engine.supervisor import Supervisor
    from moe_lora.policies.routers import make_router

    beats = heartbeat or Heartbeat()

    contents_dir = None if config.lora_server is not None else str(folder / "contents")
    config = replace(config, contents_dir=contents_dir)

    def launch(index: int, num_starts: int, adapters: tuple[tuple[str, str], ...]) -> ProcessClient:
        # Those that are served have their contents; what can't be had keeps no instance from starting.
        served = roster.adapters
        known = ((name, served[name].content_hash) for name, _ in adapters if name in served)
        contents = tuple((name, content) for name, content in known if content is not None)
        started = instance_config(config, index, num_starts, adapters)
        started = replace(started, contents=contents, leave_out_bad=True)
        return ProcessClient(started, wait=False, heartbeat_s=beats.interval_s)

    router = make_router(routing) if isinstance(routing, str) else routing
    clock, count = WallClock(), config.num_instances
    pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
    configs = [instance_config(config, i, 0, config.adapters) for i in range(count)]
    clients = start_processes(configs, beats.interval_s)
    if pool is not None:
        _fill(pool, clients, config.adapters)
    contents = _settle(clients)
    roster = Roster(clients, config.adapters, heartbeat=beats, pool=pool, contents=contents)
    fleet = FleetClient(roster, router, clock, meter=meter, ranks=ranks)
    Supervisor(roster, clients, launch, [name for name, _ in config.adapters], clock)
    try:
        yield fleet
    finally:
        asyncio.run(fleet.close())


def _fill(pool: PoolDirectory, clients: list[ProcessClient], adapters: Sequence[tuple[str, str]]) -> None:
    """Divide the adapters over new instances; if one can't be served, none of these stays."""
    try:
        pool.fill(clients, adapters)
    except BaseException:
        for client in clients:
            client.shut_down()
        raise


def _settle(clients: list[ProcessClient]) -> dict[str, str]:
    """Have new instances serve the same contents; if they can't, none of them stays."""
    from moe_lora.engine.catch_up import settle_contents

    try:
        return settle_contents(clients)
    except BaseException:
        for client in clients:
            client.shut_down()
        raise


@contextmanager
def lora_server_processes(config: EngineConfig, server: LoraServerConfig | None) -> Iterator[EngineConfig]:
    """The LoRA Server's ranks on this host, ended with the context; yields settings that name the server.

    server: its address, key and store_dir are chosen here; None: no server, nothing is started.
    """
    if server is None:
        yield config
        return

    from moe_lora.core.hf_config import read_config
    from moe_lora.core.shape import ModelShape
    from moe_lora.core.state_folder import run_folder
    from moe_lora.dist.lora_server.partition import Layout, Partition
    from moe_lora.dist.ranks import LoraServerProcesses

    with run_folder(config.state_dir) as kept, TemporaryDirectory(prefix="moe_lora-") as directory:
        server = replace(
            server,
            address=f"{directory}/lora-server",
            key=secrets.token_hex(16),
            store_dir=str(kept / "adapters"),
        )
        # Checked before there are as many processes as a layout that can't work asks for.
        shape = ModelShape.from_hf_config(read_config(Path(config.model_dir)))
        Partition(shape, Layout.parse(server.layout), config.expert_parallel, sites=server.sites)
        config = replace(config, lora_server=server)
        ranks = LoraServerProcesses(config, Layout.parse(server.layout).num_ranks, Path(directory))
        try:
            yield config
        finally:
            ranks.stop()
