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
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError

from .config import ONE_FRONT_END

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moe_lora.config import EngineConfig, FrontEndConfig
    from moe_lora.dist.cluster.controller.cluster_controller import ControlledFleet
    from moe_lora.dist.cluster.controller.controller_link import DirectedFleet
    from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
    from moe_lora.dist.launch.host_roles import HostRoles
    from moe_lora.engine.text.text import Tokenizer

    from .serve.frontend import Frontend
    from .serve.reload import Reload

    ServedFleet = ControlledFleet | DirectedFleet

logger = logging.getLogger(__name__)

T = TypeVar("T")


def serve(cluster: ClusterConfig, reload: Reload | None = None) -> None:
    """Serve HTTP over local instances, each a process, until a signal.

    cluster.engine.num_threads is per instance.  Only the addresses in front_end are used.  Raises
    ConfigError, RegistryError or AdapterError for errors known at start.
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
    from moe_lora.dist.launch.local import OwnServer, local_instances, local_lora_server

    passes_on = None if reload is None else reload.passes_on
    own = OwnServer(passes_on)
    async with (
        local_lora_server(cluster, at_once, passes_on, own) as joined,
        local_instances(joined, registry, at_once=at_once, passes_on=passes_on, server=own) as controlled,
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
    """Serve HTTP over a fleet, opened here, until a signal."""
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
        frontend = Frontend(
            client=served.fleet,
            tokenizer=tokenizer,
            cluster=cluster,
            controller=served.controller,
            name=served.name,
            adapter_texts=adapter_texts(cluster, served.instance_registry),
            checks=checks,
            aliases=served.instance_registry.aliases,
        )
        async with _scaled(frontend, served):
            yield frontend


def _scaled(frontend: Frontend, served: ServedFleet) -> AbstractAsyncContextManager[None]:
    """The number of instances follows the load, if `scaling` is set."""
    if frontend.cluster.scaling is None:
        return nullcontext()
    from moe_lora.dist.launch.local import scaled

    return scaled(
        frontend.cluster, served, lambda stats: frontend.metrics.show(None, stats, None, None).decode()
    )


def with_local_app(cluster: ClusterConfig, use: Callable[[FastAPI], Awaitable[T]]) -> T:
    """The result of `use` on the HTTP application over local instances.  Raises as `serve`."""
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


def serve_controller(
    cluster: ClusterConfig, reload: Reload | None = None, name: str | None = None, *, is_kept: bool = False
) -> None:
    """Run the controller for a cluster's front ends until a signal.

    name: of several controllers; runs once the controller leads.  is_kept: by `serve_host`.  Raises as
    `serve`, and without a controller section.
    """
    from moe_lora.dist.cluster.controller.front_end_listener import run_controller

    if not cluster.controllers_at:
        raise ConfigError(
            "the file has no controller section, so there is none to start; add one with address and "
            "engines_address"
        )
    hang_up = None if reload is None else partial(reload.begin, None)
    if cluster.leadership is not None:
        from moe_lora.dist.cluster.leadership.leader import leading

        with (
            leading(cluster, name) as (cluster, leader),
            _opened_registry(cluster) as (started, registry),
        ):
            _run(run_controller(started, registry, hang_up, leader))
        return
    with _opened_registry(cluster) as (started, registry):
        _run(run_controller(started, registry, hang_up, is_kept=is_kept))


def serve_host(cluster: ClusterConfig, num_front_ends: int, reload: Reload | None = None) -> int:
    """Run a controller, front ends on one port, instances and a LoRA Server on this host until a signal.

    Returns the exit code.  Only the addresses in front_end are used.  reload: effect of SIGHUP in all
    processes.  Raises ConfigError for errors known at start.
    """
    from moe_lora.core.host import run_folder, socket_folder
    from moe_lora.core.processes import usable_cores
    from moe_lora.dist.launch.cluster_file import cluster_file, on_sockets, set_front_end, thread_share
    from moe_lora.dist.launch.host_roles import roles_of, run_roles, spare_of
    from moe_lora.dist.launch.local import OwnServer, layouts_changed, local_lora_server
    from moe_lora.serve.server import bound

    # Report errors once, not in each process.
    cluster = _checked(cluster)
    thread_share(cluster.engine.num_threads, cluster.engine.num_instances, usable_cores())

    async def run(folder: str, contents_dir: str) -> int:
        at_once = asyncio.Event()
        passes_on = None if reload is None else reload.passes_on
        own = OwnServer(passes_on)
        async with local_lora_server(cluster, at_once, passes_on, own) as joined:
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
                        set_front_end(file, front_end)
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
                async with layouts_changed(own, file) as at_start:
                    return 0 if await run_roles(roles, drain_s, told, at_once, dead_s, spare, at_start) else 1

    async def run_in_folders() -> int:
        with socket_folder("front-end-63") as folder, run_folder(cluster.engine.state_dir) as kept:
            return await run(str(folder), str(kept / "contents"))

    with bound(cluster.front_end) as socks:
        return _run(run_in_folders())


def serve_front_end(
    cluster: ClusterConfig,
    name: str | None = None,
    listen_fds: Sequence[int] = (),
    reload: Reload | None = None,
) -> None:
    """Serve HTTP over instances that dial in, until a signal.

    listen_fds: inherited bound sockets; empty: bind new sockets.  Raises ConfigError for errors known at
    start.
    """
    from moe_lora.serve.frontend import read_served_text
    from moe_lora.serve.server import bound

    name = name or ONE_FRONT_END
    front_end = cluster.front_end_named(name)
    _check_front_end(front_end, cluster.engine)
    tokenizer = read_served_text(cluster)
    inherited = [socket.socket(fileno=one) for one in listen_fds]
    with (
        nullcontext(inherited) if inherited else bound(front_end) as socks,
        _dialled_fleet(cluster, name) as fleet,
    ):
        _run(serve_http(cluster, fleet, tokenizer, socks, reload))


@contextmanager
def _dialled_fleet(cluster: ClusterConfig, name: str) -> Iterator[AbstractAsyncContextManager[ServedFleet]]:
    """Instances that dial this front end; the controller runs here unless it has a process."""
    if cluster.controllers_at:
        from moe_lora.dist.cluster.controller.controller_link import directed_fleet

        yield directed_fleet(cluster, name)
        return
    from moe_lora.dist.cluster.controller.cluster_controller import dialled_fleet

    with _opened_registry(cluster) as (started, registry):
        yield dialled_fleet(started, registry)


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine.

    SIGTERM cancels the coroutine; a second SIGTERM ends the process at once.  Then raises SystemExit with the
    shell's status.
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
    """Settings with devices.  Raises ConfigError."""
    from moe_lora.dist.launch.local import checked

    cluster = checked(cluster)
    _check_front_end(cluster.front_end, cluster.engine)
    return cluster


def _check_front_end(front_end: FrontEndConfig, engine: EngineConfig) -> None:
    """Raises ConfigError for unreadable keys, and for experts of a dense model."""
    from moe_lora.serve.access import checked_keys

    checked_keys(front_end)
    if front_end.return_routed_experts:
        from moe_lora.families import shape_of

        if not shape_of(engine.hf_config()).num_experts:
            raise ConfigError(
                f"front_end.return_routed_experts=true needs a model with experts, and {engine.model_dir} is "
                "dense; leave it out, or give false"
            )
