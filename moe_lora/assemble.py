"""The composition root: settings in, wired processes out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moe_lora.core.config import EngineConfig
from moe_lora.engine.client import EngineClient


def serve(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    served_model_name: str | None = None,
    routing: str = "least_outstanding",
) -> None:
    """Start `config.num_instances` engine processes and serve them over HTTP until told to stop.

    config.num_threads counts for each instance.  routing: a name of `policies.routing.ROUTERS`.  Raises
    ConfigError or AdapterError for what can be known at start.
    """
    from moe_lora.engine.text import load_tokenizer
    from moe_lora.serve.server import bind, run_server

    tokenizer = load_tokenizer(config.model_dir)
    with bind(host, port) as sock, engine_processes(config, routing) as client:
        name = served_model_name or Path(config.model_dir).resolve().name
        run_server(client, tokenizer, name, sock=sock)


@contextmanager
def engine_processes(config: EngineConfig, routing: str = "least_outstanding") -> Iterator[EngineClient]:
    """Engine processes, ended with the context: one, or several that stand in for each other.

    Several are restarted when they end; one is not.
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

    clock = WallClock()
    clients = start_processes([instance_config(config, i, 0, config.adapters) for i in range(count)])
    roster = Roster(clients, config.adapters)
    fleet = FleetClient(roster, ROUTERS[routing](), clock)
    Supervisor(roster, clients, launch, [name for name, _ in config.adapters], clock)
    try:
        yield fleet
    finally:
        asyncio.run(fleet.close())
