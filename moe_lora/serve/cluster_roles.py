# SPDX-License-Identifier: Apache-2.0
"""The controller and the front ends of a cluster, built from its configuration file."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from moe_lora.config import CONTROLLER, ONE_FRONT_END
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import parse_address
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.controller.cluster_controller import controlled_fleet
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.front_end_listener import FrontEndListener, run_listener
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.controller.served_registry import opened_registry
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.listener import RECOVERY_S, InstanceListener
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.net.keys import keys_of
from moe_lora.engine.client.heartbeat import Heartbeat

from .frontend import Frontend
from .openai.checking_process import CheckingProcess
from .reload import Reload
from .served_text import adapter_texts
from .server import serve_forever

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer

ABSENCE = "none has dialled in, or all have left; send the request again in a while"
"""Text for tenants; the log has the instances' dial-in address."""


async def serve_controller(cluster: ClusterConfig, reload: Reload | None = None) -> None:
    """Run the controller of a cluster until a signal.

    reload: effect of SIGHUP.  Raises ConfigError, RegistryError or AdapterError for errors known at start.
    """
    if cluster.controller is None:
        raise ConfigError(
            "the file has no controller section, so there is none to start; add one with address and "
            "engines_address"
        )
    if reload is not None:
        again = partial(reload.begin, None)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again)
    address = parse_address("controller.address", cluster.controller.address)
    setting, place = "controller.engines_address", cluster.dialled_addresses()[CONTROLLER]
    with opened_registry(cluster) as (cluster, registry):
        async with controlled_fleet(
            cluster, make_routes(cluster), setting, place, advice=ABSENCE, registry=registry
        ) as controlled:
            listener = FrontEndListener(controlled, cluster.front_ends or (ONE_FRONT_END,))
            await run_listener(listener, address, keys_of(cluster))


async def serve_deciding(
    cluster: ClusterConfig,
    tokenizer: Tokenizer | None,
    socks: Sequence[socket.socket],
    reload: Reload | None = None,
) -> None:
    """Serve HTTP as the only front end, with the controller, until a signal.

    reload: see `serve_forever`.  Raises ConfigError, RegistryError or AdapterError for errors known at
    start.
    """
    setting = "front_end.engines_address"
    place = parse_address(setting, cluster.engines_address())
    checks = CheckingProcess(tokenizer)
    with opened_registry(cluster) as (cluster, registry):
        fleet = controlled_fleet(
            cluster,
            make_routes(cluster),
            setting,
            place,
            advice=ABSENCE,
            registry=registry,
            recovery_s=RECOVERY_S,
        )
        async with checks.started(), fleet as controlled:
            frontend = Frontend(
                client=controlled.fleet,
                tokenizer=tokenizer,
                cluster=cluster,
                controller=controlled.controller,
                adapter_texts=adapter_texts(cluster, controlled.instance_registry),
                checks=checks,
            )
            await serve_forever(frontend, socks, cluster.front_end.drain_s, reload)


async def serve_directed(
    cluster: ClusterConfig,
    name: str,
    tokenizer: Tokenizer | None,
    socks: Sequence[socket.socket],
    reload: Reload | None = None,
) -> None:
    """Serve HTTP as a front end of a controller in another process, until a signal.

    socks: from `serve.server.bound`.  reload: see `serve_forever`.  Raises ConfigError for errors known at
    start.
    """
    assert cluster.controller is not None
    checks = CheckingProcess(tokenizer)
    place, keys = cluster.dialled_addresses()[name], keys_of(cluster)
    address = parse_address("controller.address", cluster.controller.address)
    heartbeat = Heartbeat.of(cluster.front_end)
    instance_registry = InstanceRegistry((), cluster.engine.adapters, ABSENCE, heartbeat)
    routes = make_routes(cluster)
    watched = cluster.provisioning is not None
    link = ControllerLink(address, keys, name, instance_registry, routes, watched=watched)
    seed = f"{name} {cluster.engine.seed}"
    fleet = FleetClient(instance_registry, routes.router, WallClock(), link, routes.meter, seed=seed)
    frontend = Frontend(
        client=fleet,
        tokenizer=tokenizer,
        cluster=cluster,
        controller=link,
        name=name,
        adapter_texts=adapter_texts(cluster, instance_registry),
        checks=checks,
    )
    listener = InstanceListener(instance_registry, max_unread=cluster.front_end.max_unread_steps)
    async with checks.started(), listener.open(f"front_ends.{name}.engines_address", place, keys):
        try:
            await serve_forever(frontend, socks, cluster.front_end.drain_s, reload)
        finally:
            await fleet.close()
