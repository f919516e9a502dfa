# SPDX-License-Identifier: Apache-2.0
"""The composition root: settings in, wired processes out."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.engine.client.client import EngineClient
from moe_lora.policies.routing.routing import Router

from .config import ONE_FRONT_END, EngineConfig, FrontEndConfig, LoraServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moe_lora.dist.cluster.controller.cluster_controller import ControlledFleet, ServedFleet
    from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
    from moe_lora.dist.launch.host_roles import HostRoles
    from moe_lora.engine.text.text import Tokenizer

    from .serve.frontend import Frontend
    from .serve.reload import Reload

logger = logging.getLogger(__name__)

T = TypeVar("T")


def serve(cluster: ClusterConfig, reload: Reload | None = None) -> None:
    """Start the cluster's instances as processes of this host and serve HTTP until a signal.

    cluster.engine.num_threads is per instance.  Only the addresses in front_end are used, of HTTP and of
    administrators. reload: see `serve_forever`.  Raises ConfigError, RegistryError or AdapterError for
    errors known at start.
    """
    from moe_lora.serve.frontend import read_served_text
    from moe_lora.serve.server import bound

    cluster, at_once = _checked(cluster), asyncio.Event()
    tokenizer = read_served_text(cluster)
    with bound(cluster.front_end) as socks, _opened_registry(cluster) as (started, registry):
        fleet = _local_fleet(started, registry, at_once, reload)
        _run(serve_http(cluster, fleet, tokenizer, socks, reload, at_once))


@asynccontextmanager
async def _local_fleet(
    cluster: ClusterConfig, registry: ServedRegistry | None, at_once: asyncio.Event, reload: Reload | None
) -> AsyncIterator[ControlledFleet]:
    """`local_instances`, with the cluster's LoRA Server."""
    async with (
        local_lora_server(cluster, at_once, reload) as joined,
        local_instances(joined, registry, at_once=at_once, reload=reload) as controlled,
    ):
        yield controlled


async def serve_http(
    cluster: ClusterConfig,
    fleet: AbstractAsyncContextManager[ServedFleet],
    tokenizer: Tokenizer | None,
    socks: Sequence[socket.socket],
    reload: Reload | None = None,
    at_once: asyncio.Event | None = None,
) -> None:
    """Serve HTTP over a fleet until a signal.

    fleet: opened here, beside the checking process's start.  socks, reload, at_once: see `serve_forever`.
    """
    from moe_lora.serve.server import serve_forever

    async with _opened_frontend(cluster, fleet, tokenizer) as frontend:
        await serve_forever(frontend, socks, cluster.front_end.drain_s, reload, at_once)


@asynccontextmanager
async def _opened_frontend(
    cluster: ClusterConfig, fleet: AbstractAsyncContextManager[ServedFleet], tokenizer: Tokenizer | None
) -> AsyncIterator[Frontend]:
    from moe_lora.serve.frontend import Frontend, adapter_texts
    from moe_lora.serve.openai.checking_process import CheckingProcess

    checks = CheckingProcess(tokenizer)
    async with checks.started(), fleet as served:
        yield Frontend(
            client=served.fleet,
            tokenizer=tokenizer,
            cluster=cluster,
            controller=served.controller,
            name=served.name,
            adapter_texts=adapter_texts(cluster, served.instance_registry),
            checks=checks,
            aliases=served.instance_registry.aliases,
        )


def with_local_app(cluster: ClusterConfig, use: Callable[[FastAPI], Awaitable[T]]) -> T:
    """The result of `use`, called with the HTTP application over instances of this host, without a socket.

    Raises as `serve`.
    """
    from moe_lora.serve.frontend import read_served_text
    from moe_lora.serve.server import controlled, create_app

    cluster, at_once = _checked(cluster), asyncio.Event()
    tokenizer = read_served_text(cluster)

    async def run(fleet: AbstractAsyncContextManager[ServedFleet]) -> T:
        async with _opened_frontend(cluster, fleet, tokenizer) as frontend, controlled(frontend):
            return await use(create_app(frontend))

    with _opened_registry(cluster) as (started, registry):
        return _run(run(_local_fleet(started, registry, at_once, None)))


def _opened_registry(
    cluster: ClusterConfig,
) -> AbstractContextManager[tuple[ClusterConfig, ServedRegistry | None]]:
    if cluster.registry is None:
        return nullcontext((cluster, None))
    from moe_lora.dist.cluster.controller.served_registry import opened_registry

    return opened_registry(cluster)


def serve_controller(cluster: ClusterConfig, reload: Reload | None = None) -> None:
    """Run the controller for a cluster's front ends (`dist.cluster.controller`) until a signal.

    reload: effect of SIGHUP.  Raises ConfigError, RegistryError or AdapterError for errors known at start.
    """
    from moe_lora.dist.cluster.controller.front_end_listener import run_controller

    if cluster.controller is None:
        raise ConfigError(
            "the file has no controller section, so there is none to start; add one with address and "
            "engines_address"
        )
    hang_up = None if reload is None else partial(reload.begin, None)
    with _opened_registry(cluster) as (started, registry):
        _run(run_controller(started, registry, hang_up))


def serve_host(cluster: ClusterConfig, num_front_ends: int, reload: Reload | None = None) -> int:
    """Keep a controller, front ends on one port, instances and a LoRA Server running on this host until a
    signal; returns the exit code.

    Only the addresses in front_end are used, of HTTP and of administrators.  reload: effect of SIGHUP, also
    in front ends and the controller.  Raises ConfigError for errors known at start.
    """
    from moe_lora.core.host import OwnFolder, run_folder
    from moe_lora.core.processes import usable_cores
    from moe_lora.dist.launch.cluster_file import cluster_file, on_sockets, thread_share, write_cluster
    from moe_lora.dist.launch.host_roles import roles_of, run_roles, spare_of
    from moe_lora.serve.server import bound

    # Report errors here once, instead of in each process.
    cluster = _checked(cluster)
    thread_share(cluster.engine.num_threads, cluster.engine.num_instances, usable_cores())

    async def run(folder: str, contents_dir: str) -> int:
        at_once = asyncio.Event()
        async with local_lora_server(cluster, at_once, reload) as joined:
            whole = on_sockets(joined, num_front_ends, folder)
            whole = replace(whole, engine=replace(whole.engine, contents_dir=contents_dir))
            with cluster_file(whole) as file:
                roles = roles_of(whole, file, [sock.fileno() for sock in socks])

                async def pass_on(kept: HostRoles) -> None:
                    assert reload is not None
                    front_end = await reload.read_again(whole.front_end)
                    if front_end is None:
                        return
                    try:
                        write_cluster(file, replace(whole, front_end=front_end))
                    except OSError as error:
                        logger.error(
                            "processes of this server keep the settings that they have (%s): make room in "
                            "TMPDIR, then send SIGHUP again",
                            error,
                        )
                        return
                    kept.hang_up()

                drain_s, dead_s = cluster.front_end.drain_s, cluster.front_end.heartbeat_dead_s
                told = None if reload is None else pass_on
                spare = spare_of(whole, file)
                return 0 if await run_roles(roles, drain_s, told, at_once, dead_s, spare) else 1

    async def run_in_folders() -> int:
        with OwnFolder() as folder, run_folder(cluster.engine.state_dir) as kept:
            return await run(str(folder), str(kept / "contents"))

    with bound(cluster.front_end) as socks:
        return _run(run_in_folders())


def serve_front_end(
    cluster: ClusterConfig,
    name: str | None = None,
    listen_fds: Sequence[int] = (),
    reload: Reload | None = None,
) -> None:
    """Serve HTTP over instances that dial in (`dist.cluster.listener`), until a signal.

    name: among several front ends.  listen_fds: inherited bound sockets; empty: bind new sockets. reload:
    see `serve_forever`.  Raises ConfigError for errors known at start.
    """
    from moe_lora.serve.access import checked_keys
    from moe_lora.serve.frontend import read_served_text
    from moe_lora.serve.server import bound

    name = name or ONE_FRONT_END
    front_end = cluster.front_end_named(name)
    checked_keys(front_end)
    tokenizer = read_served_text(cluster)
    inherited = [socket.socket(fileno=one) for one in listen_fds]
    with (
        nullcontext(inherited) if inherited else bound(front_end) as socks,
        _dialled_fleet(cluster, name) as fleet,
    ):
        _run(serve_http(cluster, fleet, tokenizer, socks, reload))


@contextmanager
def _dialled_fleet(cluster: ClusterConfig, name: str) -> Iterator[AbstractAsyncContextManager[ServedFleet]]:
    """Instances that dial the front end of this name; without a controller's process, it is here."""
    if cluster.controller is not None:
        from moe_lora.dist.cluster.controller.controller_link import directed_fleet

        yield directed_fleet(cluster, name)
        return
    from moe_lora.core.address import parse_address
    from moe_lora.dist.cluster.controller.cluster_controller import controlled_fleet
    from moe_lora.dist.cluster.controller.routes import make_routes
    from moe_lora.dist.cluster.listener import RECOVERY_S

    setting = "front_end.engines_address"
    place = parse_address(setting, cluster.engines_address())
    with _opened_registry(cluster) as (started, registry):
        routes = make_routes(started)
        yield controlled_fleet(started, routes, setting, place, registry=registry, recovery_s=RECOVERY_S)


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine.  Before its own handler, SIGTERM cancels the coroutine for an orderly end; a second
    SIGTERM ends the process at once.

    Then raises SystemExit with the shell's status for the signal.
    """

    async def run() -> T:
        task, loop = asyncio.create_task(main), asyncio.get_running_loop()

        def end() -> None:
            task.cancel()
            loop.remove_signal_handler(signal.SIGTERM)

        loop.add_signal_handler(signal.SIGTERM, end)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def _checked(cluster: ClusterConfig) -> ClusterConfig:
    """Settings with devices, for all roles on this host.  Raises ConfigError."""
    from moe_lora.dist.cluster.controller.routes import make_routes
    from moe_lora.dist.launch.cluster_file import check_pool
    from moe_lora.dist.launch.devices import log_devices, placed
    from moe_lora.serve.access import checked_keys

    for name, place in cluster.front_ends.items():
        if place.admin_address is not None:
            raise ConfigError(
                f"front_ends.{name}.admin_address={place.admin_address} is one front end's, and all of this "
                "host share theirs; give it in front_end, or start each role by itself (--role front-end)"
            )

    make_routes(cluster)
    if cluster.front_end.placement is not None and cluster.engine.num_instances < 2:
        raise ConfigError(
            "a placement is over several instances; give --instances 2 or more, or leave it out"
        )
    check_pool(cluster.engine)
    cluster = placed(cluster)
    log_devices(cluster)
    checked_keys(cluster.front_end)
    return cluster


@asynccontextmanager
async def local_instances(
    cluster: ClusterConfig,
    registry: ServedRegistry | None = None,
    router: Router | None = None,
    at_once: asyncio.Event | None = None,
    reload: Reload | None = None,
) -> AsyncIterator[ControlledFleet]:
    """Engine processes of this host that replace each other, ended with the context.

    An ended process is started again.  registry: see `controlled_fleet`.  router: overrides the settings.
    at_once: see `HostRoles`.  reload: also for the processes.  Raises the error of a failed start.
    """
    from moe_lora.core.address import parse_address
    from moe_lora.core.host import OwnFolder, run_folder
    from moe_lora.dist.cluster.controller.cluster_controller import controlled_fleet
    from moe_lora.dist.cluster.controller.routes import make_routes
    from moe_lora.dist.launch.cluster_file import cluster_file, on_sockets
    from moe_lora.dist.launch.host_roles import HostRoles, instance_roles, spare_of

    cluster = _with_shares(cluster)
    config = cluster.engine
    routes = make_routes(cluster)
    if router is not None:
        routes = replace(routes, router=router)
    with ExitStack() as stack:
        folder = stack.enter_context(OwnFolder())
        if cluster.lora_server is None:
            kept = stack.enter_context(run_folder(config.state_dir))
            config = replace(config, contents_dir=str(kept / "contents"))
        cluster = on_sockets(replace(cluster, engine=config), 1, str(folder))
        file = stack.enter_context(cluster_file(cluster))
        parts = instance_roles(config.num_instances, file)
        async with controlled_fleet(
            cluster,
            routes,
            "the instances' socket",
            parse_address("engines_address", cluster.engines_address()),
            advice=_ALL_ENDED,
            registry=registry,
            on_give_up=lambda name: roles.kill(name),
        ) as controlled:
            instance_registry = controlled.instance_registry
            for part in parts:
                instance_registry.number_of(part.name)
            dead_s, spare = cluster.front_end.heartbeat_dead_s, spare_of(cluster, file)
            roles = HostRoles(parts, at_once=at_once, dead_s=dead_s, spare=spare)
            told = _passed_on(reload, file, cluster, roles)
            try:
                with told:
                    await roles.ready()
                    await controlled.start_together(config.num_instances, config.adapters)
                    yield controlled
            finally:
                await controlled.fleet.close()
                await roles.stop()


def _with_shares(cluster: ClusterConfig) -> ClusterConfig:
    from moe_lora.core.processes import usable_cores
    from moe_lora.dist.launch.cluster_file import thread_share
    from moe_lora.dist.launch.devices import placed

    cluster = placed(cluster)
    config = cluster.engine
    threads = thread_share(config.num_threads, config.num_instances, usable_cores())
    return replace(cluster, engine=replace(config, num_threads=threads))


@contextmanager
def _passed_on(reload: Reload | None, file: int, cluster: ClusterConfig, roles: HostRoles) -> Iterator[None]:
    """Keep the processes' log level equal to this process's.  file: the processes' settings file, with
    `cluster`.
    """
    from moe_lora.dist.launch.cluster_file import write_cluster

    def tell(now: FrontEndConfig) -> None:
        front_end = replace(cluster.front_end, log_level=now.log_level)
        write_cluster(file, replace(cluster, front_end=front_end))
        roles.hang_up()

    if reload is None:
        yield
        return
    reload.passes_on.append(tell)
    try:
        yield
    finally:
        reload.passes_on.remove(tell)


_ALL_ENDED = "each that ended is being started again; send the request again in a while"


@contextmanager
def engine_processes(
    config: EngineConfig, front_end: FrontEndConfig | None = None, router: Router | None = None
) -> Iterator[EngineClient]:
    """`local_instances` for callers of any thread and event loop."""
    from moe_lora.dist.net.thread import entered
    from moe_lora.engine.client.loop_client import ThreadedClient

    cluster = _instances_only(config, front_end or FrontEndConfig())
    with entered(lambda: local_instances(cluster, router=router)) as (controlled, thread):
        yield cast("EngineClient", ThreadedClient(controlled.fleet, thread))


@contextmanager
def instance_processes(config: EngineConfig) -> Iterator[list[EngineClient]]:
    """The separate engines of `local_instances`, for callers of any thread and event loop."""
    from moe_lora.dist.net.thread import entered
    from moe_lora.engine.client.loop_client import ThreadedClient

    cluster = _instances_only(config, FrontEndConfig())
    with entered(lambda: local_instances(cluster)) as (controlled, thread):
        instances = controlled.instance_registry.instances
        yield [cast("EngineClient", ThreadedClient(one.client, thread)) for one in instances]


@contextmanager
def lora_server_processes(config: EngineConfig, server: LoraServerConfig | None) -> Iterator[EngineConfig]:
    """`local_lora_server` for callers of any thread; yields settings of an engine with the server."""
    from moe_lora.dist.net.thread import entered

    cluster = replace(_instances_only(config, FrontEndConfig()), lora_server=server)
    with entered(lambda: local_lora_server(cluster)) as (joined, _):
        yield joined.instance()


def _instances_only(config: EngineConfig, front_end: FrontEndConfig) -> ClusterConfig:
    """A cluster without HTTP."""
    return ClusterConfig(
        engine=replace(config, lora_server=None),
        served_model_name=config.model_dir,
        lora_server=config.lora_server,
        front_end=front_end,
    )


@asynccontextmanager
async def local_lora_server(
    cluster: ClusterConfig, at_once: asyncio.Event | None = None, reload: Reload | None = None
) -> AsyncIterator[ClusterConfig]:
    """The LoRA Server's ranks on this host, ended with the context; yields settings that name the server.

    Chooses address and store_dir.  at_once: see `HostRoles`.  reload: also for the ranks. Starts no process
    without a LoRA Server.
    """
    given = cluster.lora_server
    if given is None:
        yield cluster
        return

    from moe_lora.core.host import OwnFolder, run_folder
    from moe_lora.core.partition import Layout, Partition
    from moe_lora.dist.launch.cluster_file import cluster_file
    from moe_lora.dist.launch.devices import placed
    from moe_lora.dist.launch.host_roles import HostRoles, server_roles
    from moe_lora.families import shape_of

    cluster = placed(cluster)
    config = cluster.engine
    with ExitStack() as stack:
        folder = stack.enter_context(OwnFolder())
        kept = stack.enter_context(run_folder(config.state_dir))
        server = replace(given, address=f"{folder}/lora-server", store_dir=str(kept / "adapters"))
        # Check before the start of a process per rank.
        shape = shape_of(config.hf_config())
        layout = Layout.parse(server.layout)
        Partition(shape, layout, config.expert_parallel, sites=server.sites)
        cluster = replace(cluster, lora_server=server)
        # The file names no other address, so a rank deletes only this folder.
        alone = replace(
            cluster,
            certificates=None,
            front_end=replace(cluster.front_end, engines_address=None),
            front_ends={},
            controller=None,
        )
        file = stack.enter_context(cluster_file(alone))
        dead_s = cluster.front_end.heartbeat_dead_s
        roles = HostRoles(server_roles(layout.num_ranks, file), at_once=at_once, dead_s=dead_s)
        try:
            with _passed_on(reload, file, alone, roles):
                await roles.ready()
                yield cluster
        finally:
            await roles.stop()
