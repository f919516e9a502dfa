"""The composition root: settings in, wired processes out."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.engine.client.client import CallableEngine, EngineClient
from moe_lora.policies.routing import Router, TokenMeter

from .config import ONE_FRONT_END, EngineConfig, LoraServerConfig

if TYPE_CHECKING:
    from moe_lora.dist.cluster.controller.placement_controller import Routes
    from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
    from moe_lora.dist.cluster.instances import InstanceRegistry
    from moe_lora.dist.cluster.routing_client import FleetClient
    from moe_lora.engine.client.heartbeat import Heartbeat


def serve(cluster: ClusterConfig) -> None:
    """Start the cluster's instances as processes of this host and serve them over HTTP until told to stop.

    cluster.engine.num_threads counts for each instance.  Of the cluster's addresses only that of HTTP counts.
    Raises ConfigError, RegistryError or AdapterError for what can be known at start.
    """
    from moe_lora.dist.cluster.controller.capacity_controller import make_controller
    from moe_lora.dist.cluster.controller.cluster_controller import Decisions
    from moe_lora.dist.cluster.controller.served_registry import opened_registry
    from moe_lora.engine.client.heartbeat import Heartbeat
    from moe_lora.engine.text.text import load_tokenizer
    from moe_lora.serve.cluster_roles import only_front_end
    from moe_lora.serve.server import bind, serve_forever

    routes, config, name = _checked_routes(cluster), cluster.engine, cluster.served_model_name
    tokenizer, front_end = load_tokenizer(config.model_dir), cluster.front_end

    async def run(config: EngineConfig, served: ServedRegistry | None) -> None:
        heartbeat = Heartbeat.of(routes.config)
        async with (
            local_lora_server(config, cluster.lora_server) as joined,
            local_instances(
                joined, routes.router, meter=routes.meter, ranks=routes.ranks, heartbeat=heartbeat
            ) as fleet,
        ):
            decisions = Decisions(
                fleet=fleet,
                meter=routes.meter,
                placement=routes.placement(fleet),
                provision=make_controller(cluster.provision, fleet, joined.lora_server),
                registry=served,
            )
            deciding = only_front_end(decisions, tokenizer, name, front_end.cors_origins)
            await serve_forever(deciding, sock, front_end.drain_s)

    with (
        bind(front_end.host, front_end.port) as sock,
        opened_registry(cluster.registry, config, name) as (config, served),
    ):
        asyncio.run(run(config, served))


def serve_controller(cluster: ClusterConfig) -> None:
    """Decide for the front ends of a cluster (see `dist.cluster.controller`) until told to stop.

    Raises ConfigError, RegistryError or AdapterError for what can be known at start.
    """
    from .serve import cluster_roles

    asyncio.run(cluster_roles.serve_controller(cluster))


def serve_host(cluster: ClusterConfig, num_front_ends: int) -> int:
    """Start a controller, front ends on one port, instances and a LoRA Server as processes of this host, and
    keep them running until told to stop; the exit code.

    Of the cluster's addresses only that of HTTP counts.  Raises ConfigError for what can be known at start.
    """
    from moe_lora.core.host import run_folder
    from moe_lora.dist.launch.host_roles import cluster_file, on_sockets, roles_of, run_roles, thread_share
    from moe_lora.engine.client.process import usable_cores
    from moe_lora.serve.server import bind

    # What can't work is said here, once, and not by each process.
    _checked_routes(cluster)
    thread_share(cluster.engine.num_threads, cluster.engine.num_instances, usable_cores())

    async def run(folder: str, contents_dir: str) -> int:
        async with local_lora_server(cluster.engine, cluster.lora_server) as joined:
            whole = on_sockets(cluster, num_front_ends, joined.lora_server, folder)
            whole = replace(whole, engine=replace(whole.engine, contents_dir=contents_dir))
            with cluster_file(whole) as file:
                roles = roles_of(whole, file, sock.fileno())
                return 0 if await run_roles(roles, cluster.front_end.drain_s) else 1

    with (
        bind(cluster.front_end.host, cluster.front_end.port) as sock,
        TemporaryDirectory(prefix="moe_lora-") as folder,
        run_folder(cluster.engine.state_dir) as kept,
    ):
        return asyncio.run(run(folder, str(kept / "contents")))


def serve_front_end(cluster: ClusterConfig, name: str | None = None, listen_fd: int | None = None) -> None:
    """Serve over HTTP what instances compute that dial in (see `dist.cluster.listener`), until told to stop.

    name: of one of several.  listen_fd: a bound socket that the process inherits; None: it makes one.
    Raises ConfigError for what can be known at start.
    """
    from moe_lora.engine.text.text import load_tokenizer
    from moe_lora.serve.cluster_roles import serve_deciding, serve_directed
    from moe_lora.serve.server import bind

    name = name or ONE_FRONT_END
    front_end = cluster.front_end_named(name)
    tokenizer = load_tokenizer(cluster.engine.model_dir)
    with (
        bind(front_end.host, front_end.port) if listen_fd is None else socket.socket(fileno=listen_fd) as sock
    ):
        if cluster.controller is None:
            asyncio.run(serve_deciding(cluster, tokenizer, sock))
        else:
            asyncio.run(serve_directed(cluster, name, tokenizer, sock))


def _checked_routes(cluster: ClusterConfig) -> Routes:
    """What routes the requests to instances of this host.  Raises ConfigError."""
    from moe_lora.dist.cluster.controller.placement_controller import make_routes
    from moe_lora.dist.launch.host_roles import check_pool

    routes = make_routes(cluster.front_end, cluster.engine.max_num_seqs, cluster.engine.lora_kernel)
    if cluster.front_end.placement is not None and cluster.engine.num_instances < 2:
        raise ConfigError(
            "a placement is over several instances; give --instances 2 or more, or leave it out"
        )
    check_pool(cluster.engine)
    return routes


@asynccontextmanager
async def local_instances(
    config: EngineConfig,
    routing: str | Router = "least_outstanding",
    *,
    meter: TokenMeter | None = None,
    ranks: dict[str, int] | None = None,
    heartbeat: Heartbeat | None = None,
) -> AsyncIterator[FleetClient]:
    """Engine processes of this host that stand in for each other, ended with the context.

    Each that ends is started again.  routing: a router, or the name of one in `policies.routers.ROUTERS`.
    meter, ranks: see `FleetClient`.  heartbeat: when one is silent.  Raises what keeps one from starting.
    """
    from moe_lora.core.address import Address
    from moe_lora.core.clock import WallClock
    from moe_lora.core.host import run_folder
    from moe_lora.dist.cluster.instances import InstanceRegistry
    from moe_lora.dist.cluster.listener import CatchUp, InstanceListener, Recovery
    from moe_lora.dist.cluster.pool.directory import PoolDirectory
    from moe_lora.dist.cluster.routing_client import FleetClient
    from moe_lora.dist.launch.host_roles import (
        HostRoles,
        Role,
        StartInstance,
        instance_config,
        start_file,
        thread_share,
    )
    from moe_lora.engine.client.process import usable_cores, worker_environment
    from moe_lora.policies.routers import make_router

    count = config.num_instances
    config = replace(config, num_threads=thread_share(config.num_threads, count, usable_cores()))
    pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
    instance_registry = InstanceRegistry((), config.adapters, _ALL_ENDED, heartbeat, pool)
    recovery = Recovery(instance_registry, None)
    router = make_router(routing) if isinstance(routing, str) else routing
    fleet = FleetClient(instance_registry, router, WallClock(), meter=meter, ranks=ranks)
    listener = InstanceListener(
        instance_registry, CatchUp(instance_registry, recovery), on_give_up=lambda name: roles.kill(name)
    )
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="moe_lora-"))
        if config.lora_server is None:
            kept = stack.enter_context(run_folder(config.state_dir))
            config = replace(config, contents_dir=str(kept / "contents"))
        address = Address(path=f"{folder}/instances")
        parts = []
        for index in range(count):
            part = instance_config(config, index, config.adapters)
            instance_registry.number_of(part.instance)
            parts.append(
                Role(
                    name=part.instance,
                    kind="instance",
                    words=local_worker(
                        file := stack.enter_context(start_file(StartInstance(part, address, folder)))
                    ),
                    fds=(file,),
                    environment=worker_environment(part.threads_per_process),
                )
            )
        async with listener.open("the instances' socket", address, None):
            roles = HostRoles(parts)
            roles.failed.add_done_callback(
                lambda failed: setattr(instance_registry, "advice", str(failed.result()))
            )
            try:
                await roles.ready()
                while (
                    not all(one.starting for one in instance_registry.instances)
                    or len(instance_registry.instances) < count
                ):
                    await asyncio.sleep(_LOOK_S)
                if pool is not None:
                    clients = [one.starting for one in instance_registry.instances]
                    await pool.fill(cast("list[CallableEngine]", clients), config.adapters)
                recovery.end()
                while len(instance_registry.live) < count:
                    await asyncio.sleep(_LOOK_S)
                _check_all_there(instance_registry)
                yield fleet
            finally:
                await fleet.close()
                await roles.stop()


def _check_all_there(instance_registry: InstanceRegistry) -> None:
    """Raises AdapterError if an instance lacks at the start what the others serve."""
    for instance in instance_registry.live:
        if instance.missing:
            names = ", ".join(sorted(instance.missing))
            raise AdapterError(
                f"instance {instance.name} can't have what others read of {names}; the log says why: let "
                "nothing write to the folders of adapters while the server starts"
            )


_LOOK_S = 0.01
_ALL_ENDED = "each that ended is being started again; send the request again in a while"


@contextmanager
def engine_processes(
    config: EngineConfig, routing: str | Router = "least_outstanding", *, heartbeat: Heartbeat | None = None
) -> Iterator[EngineClient]:
    """`local_instances` for callers of any thread and event loop."""
    from moe_lora.dist.net.thread import entered
    from moe_lora.engine.client.loop_client import ThreadedClient

    with entered(lambda: local_instances(config, routing, heartbeat=heartbeat)) as (client, thread):
        yield ThreadedClient(client, thread)


@contextmanager
def instance_processes(config: EngineConfig) -> Iterator[list[EngineClient]]:
    """The engines of `local_instances`, each by itself, for callers of any thread and event loop."""
    from moe_lora.dist.net.thread import entered
    from moe_lora.engine.client.loop_client import ThreadedClient

    with entered(lambda: local_instances(config)) as (fleet, thread):
        yield [ThreadedClient(one.client, thread) for one in fleet.instances]


@contextmanager
def lora_server_processes(config: EngineConfig, server: LoraServerConfig | None) -> Iterator[EngineConfig]:
    """`local_lora_server` for callers of any thread."""
    from moe_lora.dist.net.thread import entered

    with entered(lambda: local_lora_server(config, server)) as (joined, _):
        yield joined


@asynccontextmanager
async def local_lora_server(
    config: EngineConfig, server: LoraServerConfig | None
) -> AsyncIterator[EngineConfig]:
    """The LoRA Server's ranks on this host, ended with the context; yields settings that name the server.

    server: its address and store_dir are chosen here; None: no server, nothing is started.
    """
    if server is None:
        yield config
        return

    from moe_lora.core.hf_config import read_config
    from moe_lora.core.host import run_folder
    from moe_lora.core.shape import ModelShape
    from moe_lora.dist.launch.host_roles import THREADS_PER_RANK, HostRoles, Role, StartRank, start_file
    from moe_lora.dist.lora_server.protocol.partition import Layout, Partition
    from moe_lora.engine.client.process import worker_environment

    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix="moe_lora-"))
        kept = stack.enter_context(run_folder(config.state_dir))
        server = replace(
            server,
            address=f"{directory}/lora-server",
            store_dir=str(kept / "adapters"),
        )
        # Checked before there are as many processes as a layout that can't work asks for.
        shape = ModelShape.from_hf_config(read_config(Path(config.model_dir)))
        Partition(shape, Layout.parse(server.layout), config.expert_parallel, sites=server.sites)
        config = replace(config, lora_server=server)
        parts = []
        for rank in range(Layout.parse(server.layout).num_ranks):
            file = stack.enter_context(start_file(StartRank(config, rank, directory)))
            parts.append(
                Role(
                    name=f"lora-server-{rank}",
                    kind="lora-server",
                    words=local_worker(file),
                    fds=(file,),
                    environment=worker_environment(THREADS_PER_RANK),
                )
            )
        roles = HostRoles(parts)
        try:
            await roles.ready()
            yield config
        finally:
            await roles.stop()


def local_worker(start_file: int) -> tuple[str, ...]:
    """Words of the command of a process that does what the file (see `dist.launch.host_roles`) says.

    It ends with this process.
    """
    return (
        "-m",
        "moe_lora.dist.launch.run_role",
        "--start-fd",
        str(start_file),
        "--parent",
        str(os.getpid()),
    )
