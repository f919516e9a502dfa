"""The composition root: settings in, wired processes out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe_lora.core.config import EngineConfig, LoraServerConfig
from moe_lora.dist.cluster import ClusterConfig
from moe_lora.engine.client import EngineClient
from moe_lora.policies.routing import Router


def serve(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    served_model_name: str | None = None,
    routing: str = "least_outstanding",
    lora_server: Mapping[str, Any] | None = None,
) -> None:
    """Start `config.num_instances` engine processes and serve them over HTTP until told to stop.

    config.num_threads counts for each instance.  routing: a name of `policies.routing.ROUTERS`.  lora_server:
    see `lora_server_processes`.  Raises ConfigError or AdapterError for what can be known at start.
    """
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.serve.server import bind, run_server

    tokenizer = load_tokenizer(config.model_dir)
    with (
        bind(host, port) as sock,
        lora_server_processes(config, lora_server) as joined,
        engine_processes(joined, routing) as client,
    ):
        name = served_model_name or Path(config.model_dir).resolve().name
        run_server(client, tokenizer, name, sock=sock)


def serve_front_end(cluster: ClusterConfig) -> None:
    """Serve over HTTP what instances compute that dial in (see `engine.door`), until told to stop.

    Raises ConfigError for what can be known at start.
    """
    from moe_lora.core.clock import WallClock
    from moe_lora.dist.cluster import parse_host_port
    from moe_lora.engine.door import Door
    from moe_lora.engine.fleet import FleetClient
    from moe_lora.engine.roster import Roster
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.policies.routing import ROUTERS
    from moe_lora.serve.server import bind, run_server

    front_end, config = cluster.front_end, cluster.engine
    address, key = cluster.engines_address(), cluster.secret()
    tokenizer = load_tokenizer(config.model_dir)
    advice = (
        f"none has dialled in at {address} or all have left; start one, or send the request again in a while"
    )
    roster = Roster((), config.adapters, advice)
    fleet = FleetClient(roster, ROUTERS[front_end.routing](), WallClock())
    with bind(front_end.host, front_end.port) as sock:
        door = Door(*parse_host_port("front_end.engines_address", address), key, roster)
        try:
            run_server(fleet, tokenizer, cluster.served_model_name, sock=sock)
        finally:
            door.close()
            asyncio.run(fleet.close())


@contextmanager
def engine_processes(
    config: EngineConfig, routing: str | Router = "least_outstanding"
) -> Iterator[EngineClient]:
    """Engine processes, ended with the context: one, or several that stand in for each other.

    Several are restarted when they end; one is not.  routing: a name of `policies.routing.ROUTERS`, or one.
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
    from moe_lora.engine.roster import Roster
    from moe_lora.engine.supervisor import Supervisor
    from moe_lora.policies.routing import ROUTERS

    def launch(index: int, num_starts: int, adapters: tuple[tuple[str, str], ...]) -> ProcessClient:
        return ProcessClient(instance_config(config, index, num_starts, adapters), wait=False)

    router = ROUTERS[routing]() if isinstance(routing, str) else routing
    clock = WallClock()
    clients = start_processes([instance_config(config, i, 0, config.adapters) for i in range(count)])
    roster = Roster(clients, config.adapters)
    fleet = FleetClient(roster, router, clock)
    Supervisor(roster, clients, launch, [name for name, _ in config.adapters], clock)
    try:
        yield fleet
    finally:
        asyncio.run(fleet.close())


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
