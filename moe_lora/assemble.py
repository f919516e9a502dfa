"""The composition root: settings in, wired processes out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from moe_lora.core.config import (
    EngineConfig,
    LoraServerConfig,
    ProvisionConfig,
    RegistryConfig,
    RoutingConfig,
)
from moe_lora.core.errors import ConfigError
from moe_lora.core.token_meter import TokenMeter
from moe_lora.dist.cluster import ClusterConfig
from moe_lora.engine.client import EngineClient
from moe_lora.policies.routing import Router

if TYPE_CHECKING:
    from moe_lora.engine.pool_directory import PoolDirectory
    from moe_lora.engine.process import ProcessClient
    from moe_lora.serve.controller import Controller


def serve(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    served_model_name: str | None = None,
    routing: RoutingConfig | None = None,
    lora_server: Mapping[str, Any] | None = None,
    provision: ProvisionConfig | None = None,
    registry: RegistryConfig | None = None,
) -> None:
    """Start `config.num_instances` engine processes and serve them over HTTP until told to stop.

    config.num_threads counts for each instance.  lora_server: see `lora_server_processes`.  provision,
    registry: see `ClusterConfig`.  Raises ConfigError, RegistryError or AdapterError for what can be known at
    start.
    """
    from moe_lora.engine.shares import check_pool
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.serve.routes import make_routes
    from moe_lora.serve.served_registry import opened_registry
    from moe_lora.serve.server import bind, run_server

    routes = make_routes(routing or RoutingConfig(), config.max_num_seqs)
    if routes.config.placement is not None and config.num_instances < 2:
        raise ConfigError(
            "a placement is over several instances; give --instances 2 or more, or leave it out"
        )
    check_pool(config)
    tokenizer = load_tokenizer(config.model_dir)
    name = served_model_name or Path(config.model_dir).resolve().name
    with (
        bind(host, port) as sock,
        opened_registry(registry, config, name) as (config, served),
        lora_server_processes(config, lora_server) as joined,
        engine_processes(joined, routes.router, meter=routes.meter, ranks=routes.ranks) as client,
    ):
        run_server(
            client,
            tokenizer,
            name,
            sock=sock,
            controller=_controller(provision, client, joined.lora_server),
            placement=routes.placement(client),
            registry=served,
        )


def serve_front_end(cluster: ClusterConfig) -> None:
    """Serve over HTTP what instances compute that dial in (see `engine.door`), until told to stop.

    Raises ConfigError for what can be known at start.
    """
    from moe_lora.core.clock import WallClock
    from moe_lora.dist.cluster import parse_host_port
    from moe_lora.engine.door import Door
    from moe_lora.engine.fleet import FleetClient
    from moe_lora.engine.pool_directory import PoolDirectory
    from moe_lora.engine.roster import Roster
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.serve.routes import make_routes
    from moe_lora.serve.served_registry import opened_registry
    from moe_lora.serve.server import bind, run_server

    front_end, config = cluster.front_end, cluster.engine
    address, key = cluster.engines_address(), cluster.secret()
    tokenizer = load_tokenizer(config.model_dir)
    advice = (
        f"none has dialled in at {address} or all have left; start one, or send the request again in a while"
    )
    name = cluster.served_model_name
    with (
        bind(front_end.host, front_end.port) as sock,
        opened_registry(cluster.registry, config, name) as (config, served),
    ):
        pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
        roster = Roster((), config.adapters, advice, pool)
        routes = make_routes(front_end, config.max_num_seqs)
        fleet = FleetClient(roster, routes.router, WallClock(), meter=routes.meter, ranks=routes.ranks)
        door = Door(*parse_host_port("front_end.engines_address", address), key, roster)
        try:
            run_server(
                fleet,
                tokenizer,
                name,
                sock=sock,
                controller=_controller(cluster.provision, fleet, cluster.instance().lora_server),
                placement=routes.placement(fleet),
                registry=served,
            )
        finally:
            door.close()
            asyncio.run(fleet.close())


def _controller(
    provision: ProvisionConfig | None, client: EngineClient, server: LoraServerConfig | None
) -> Controller | None:
    """The controller as `ClusterConfig.provision` says."""
    from moe_lora.dist.lora_server.admin import LoraServerAdmin
    from moe_lora.serve.controller import Controller

    if provision is None and server is None:
        return None
    admin = None if server is None else LoraServerAdmin(server.address, server.key)
    return Controller(provision or ProvisionConfig(), client, admin)


@contextmanager
def engine_processes(
    config: EngineConfig,
    routing: str | Router = "least_outstanding",
    *,
    meter: TokenMeter | None = None,
    ranks: dict[str, int] | None = None,
) -> Iterator[EngineClient]:
    """Engine processes, ended with the context: one, or several that stand in for each other.

    Several are restarted when they end; one is not.  routing: a router, or the name of one in
    `policies.routers.ROUTERS`.  meter, ranks: see `FleetClient`.
    """
    from moe_lora.engine.process import ProcessClient, start_processes, usable_cores
    from moe_lora.engine.shares import instance_config, thread_share

    count = config.num_instances
    config = replace(config, num_threads=thread_share(config.num_threads, count, usable_cores()))
    if count == 1:
        single = ProcessClient(config)
        try:
            yield single
        finally:
            single.shut_down()
        return

    from moe_lora.core.clock import WallClock
    from moe_lora.engine.fleet import FleetClient
    from moe_lora.engine.pool_directory import PoolDirectory
    from moe_lora.engine.roster import Roster
    from moe_lora.engine.supervisor import Supervisor
    from moe_lora.policies.routers import make_router

    def launch(index: int, num_starts: int, adapters: tuple[tuple[str, str], ...]) -> ProcessClient:
        return ProcessClient(instance_config(config, index, num_starts, adapters), wait=False)

    router = make_router(routing) if isinstance(routing, str) else routing
    clock = WallClock()
    pool = None if config.pool is None else PoolDirectory(config.pool.replicas)
    clients = start_processes([instance_config(config, i, 0, config.adapters) for i in range(count)])
    if pool is not None:
        _fill(pool, clients, config.adapters)
    roster = Roster(clients, config.adapters, pool=pool)
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


@contextmanager
def lora_server_processes(config: EngineConfig, options: Mapping[str, Any] | None) -> Iterator[EngineConfig]:
    """The LoRA Server's ranks on this host, ended with the context; yields settings that name the server.

    options: fields of `LoraServerConfig` but address, key and store_dir; None: no server, nothing is started.
    """
    if options is None:
        yield config
        return

    from moe_lora.core.hf_config import read_config
    from moe_lora.core.shape import ModelShape
    from moe_lora.dist.lora_server.partition import Layout, Partition
    from moe_lora.dist.ranks import LoraServerProcesses

    with TemporaryDirectory(prefix="moe_lora-") as directory:
        server = LoraServerConfig(
            **options,
            address=f"{directory}/lora-server",
            key=secrets.token_hex(16),
            store_dir=f"{directory}/adapters",
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
