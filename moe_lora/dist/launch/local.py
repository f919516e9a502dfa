# SPDX-License-Identifier: Apache-2.0
"""Instances and LoRA Server as a caller's processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from moe_lora.config import FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import parse_address
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import run_folder, socket_folder
from moe_lora.core.processes import usable_cores
from moe_lora.dist.cluster.controller.cluster_controller import ControlledFleet, controlled_fleet
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.policies.routing.routing import Router

from .cluster_file import (
    check_instances,
    cluster_file,
    cluster_in,
    log_devices,
    most_instances,
    on_sockets,
    placed,
    set_front_end,
    thread_share,
)
from .host_roles import HostRoles, Role, instance_roles, server_roles, spare_of

if TYPE_CHECKING:
    from moe_lora.core.request import EngineStats
    from moe_lora.dist.cluster.controller.served_registry import ServedRegistry

Listeners = list[Callable[[FrontEndConfig], None]]
"""Called with reloaded settings."""
_ALL_ENDED = "each that ended is being started again; send the request again in a while"


def checked(cluster: ClusterConfig) -> ClusterConfig:
    """Settings with devices, checked for one host.  Raises ConfigError."""
    apart = [name for name in ("controllers", "leadership") if getattr(cluster, name)]
    for name, place in cluster.front_ends.items():
        for one in ("host", "port", "admin_address"):
            if getattr(place, one) not in (None, getattr(cluster.front_end, one)):
                apart.append(f"front_ends.{name}.{one}")
    if apart:
        raise ConfigError(
            f"{', '.join(apart)}: all front ends of one server have the addresses in front_end, and one "
            "controller; leave the settings out, or start each role by itself (--role)"
        )
    make_routes(cluster)
    check_instances(cluster)
    if cluster.engine.kv_events is not None:
        from moe_lora.config.kv_events import read_settings

        read_settings(cluster.engine.kv_events, most_instances(cluster), one_host=True)
    if cluster.scaling is not None:
        from .local_scaling import check_scaling

        check_scaling(cluster)
    cluster = placed(cluster)
    log_devices(cluster)
    return cluster


@asynccontextmanager
async def local_instances(
    cluster: ClusterConfig,
    registry: ServedRegistry | None = None,
    router: Router | None = None,
    at_once: asyncio.Event | None = None,
    passes_on: Listeners | None = None,
    server: OwnServer | None = None,
) -> AsyncIterator[ControlledFleet]:
    """This host's engine processes, restarted on failure and ended with the context.

    passes_on: gets these processes' listener.  server: the LoRA Server, for changes of its layout.  Raises
    the error of a failed start.
    """
    given, cluster = cluster, _with_shares(cluster)
    config, num_instances = cluster.engine, given.engine.num_instances
    routes = make_routes(cluster)
    if router is not None:
        routes = replace(routes, router=router)
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder("engines"))
        if cluster.lora_server is None or cluster.front_end.prefill_instances:
            kept = stack.enter_context(run_folder(config.state_dir))
            config = replace(config, contents_dir=str(kept / "contents"))
        cluster = on_sockets(replace(cluster, engine=config), 1, str(folder))
        file = stack.enter_context(cluster_file(cluster))
        parts = instance_roles(num_instances, file)
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
            told = passed_on(passes_on, file, roles)
            try:
                with told:
                    await roles.ready()
                    await controlled.start_together(num_instances, config.adapters)
                    if given.scaling is not None:
                        from .local_scaling import LocalScaling

                        LocalScaling(given, file, roles, controlled)
                    if server is not None and server.now is not None:
                        server.let_change(file, roles, controlled)
                    yield controlled
            finally:
                await controlled.fleet.close()
                await roles.stop()


def scaled(
    cluster: ClusterConfig, served: object, metrics: Callable[[EngineStats], str]
) -> AbstractAsyncContextManager[None]:
    """Meanwhile the load changes the number of `local_instances`.  metrics: Prometheus text."""
    from .local_scaling import by_load

    assert isinstance(served, ControlledFleet)
    return by_load(cluster, served, metrics)


def _with_shares(cluster: ClusterConfig) -> ClusterConfig:
    cluster = placed(cluster)
    config = replace(cluster.engine, num_instances=most_instances(cluster))
    threads = thread_share(config.num_threads, config.num_instances, usable_cores())
    return replace(cluster, scaling=None, engine=replace(config, num_threads=threads))


@contextmanager
def passed_on(passes_on: Listeners | None, file: int, roles: HostRoles) -> Iterator[None]:
    """Keep the processes' log level equal to this process's."""

    def tell(now: FrontEndConfig) -> None:
        set_front_end(file, replace(cluster_in(file).front_end, log_level=now.log_level))
        roles.hang_up()

    if passes_on is None:
        yield
        return
    passes_on.append(tell)
    try:
        yield
    finally:
        passes_on.remove(tell)


@dataclass
class Generation:
    """A LoRA Server's ranks of one layout.  cluster: in their file.  files: closed after their end."""

    cluster: ClusterConfig
    roles: Sequence[Role]
    files: ExitStack


class OwnServer:
    """The keeper of this host's LoRA Server.  now: None before the start."""

    def __init__(self, passes_on: Listeners | None = None) -> None:
        self.passes_on = passes_on
        self.now: Generation | None = None
        self.ranks: HostRoles

    def let_change(self, file: int, instances: HostRoles, controlled: ControlledFleet) -> None:
        """Let an administrator change the layout.  file: of the instances."""

        async def change(layout: str, capacity: int, limit_s: float) -> str:
            from .local_layout import ControlledInstances, LayoutChange

            apart = cluster_in(file).front_end.prefill_instances
            found = ControlledInstances(instances, controlled.instance_registry, apart)
            return await LayoutChange(self, file, found).to(layout, capacity, limit_s)

        assert controlled.controller.provision is not None
        controlled.controller.provision.relayout = change


@asynccontextmanager
async def layouts_changed(own: OwnServer, file: int) -> AsyncIterator[Callable[[HostRoles], None]]:
    """Meanwhile a separate controller may change the layout.  file: of the roles; yields a setter of them."""
    if own.now is None:
        yield lambda roles: None
        return
    from .local_layout import LayoutKeeper

    keeper = LayoutKeeper(own, file)
    async with keeper.open():
        yield partial(setattr, keeper, "roles")


@asynccontextmanager
async def local_lora_server(
    cluster: ClusterConfig,
    at_once: asyncio.Event | None = None,
    passes_on: Listeners | None = None,
    own: OwnServer | None = None,
) -> AsyncIterator[ClusterConfig]:
    """The LoRA Server's ranks on this host; yields settings with its address."""
    given = cluster.lora_server
    if given is None:
        yield cluster
        return

    from moe_lora.families import shape_of

    from .server_role import checked_partition

    cluster = placed(cluster)
    config = cluster.engine
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder("lora-server.63"))
        kept = stack.enter_context(run_folder(config.state_dir))
        server = replace(given, address=f"{folder}/lora-server", store_dir=str(kept / "adapters"))
        # Check before the start of processes.
        layout = checked_partition(config, shape_of(config.hf_config()), server).layout
        cluster = replace(cluster, lora_server=server)
        # The file names no other address, so a rank deletes only this folder.
        alone = replace(
            cluster,
            certificates=None,
            front_end=replace(cluster.front_end, engines_address=None),
            front_ends={},
            controller=None,
            controllers={},
            leadership=None,
        )
        own = own or OwnServer(passes_on)
        files = ExitStack()
        file = files.enter_context(cluster_file(replace(alone, scaling=None)))
        roles = server_roles(layout.num_ranks, file)
        own.ranks = HostRoles(roles, at_once=at_once, dead_s=cluster.front_end.heartbeat_dead_s)
        own.now = Generation(alone, roles, files)
        try:
            files.enter_context(passed_on(passes_on, file, own.ranks))
            await own.ranks.ready()
            yield cluster
        finally:
            await own.ranks.stop()
            own.now.files.close()
