"""A whole cluster on this host: its file, and its roles as processes (`host_roles` keeps them running)."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryFile

from moe_lora.config import ControllerConfig, FrontEndPlace, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig, cluster_text

from .host_roles import FRONT_END, Role


@contextmanager
def cluster_file(cluster: ClusterConfig) -> Iterator[int]:
    """A descriptor of the cluster's file.

    The file has no name, since it holds the key: nobody else can open it, and nothing stays of it however the
    processes end that have it open.
    """
    with TemporaryFile() as file:
        file.write(cluster_text(cluster).encode())
        file.flush()
        yield file.fileno()


def on_loopback(
    cluster: ClusterConfig, num_front_ends: int, server: LoraServerConfig | None
) -> ClusterConfig:
    """The same cluster with a key of its own and addresses on this host.

    server: the LoRA Server that runs here, None if there is none.
    """
    addresses = iter(_free_addresses(2 + num_front_ends))
    return replace(
        cluster,
        key=secrets.token_hex(32) if server is None else server.key,
        lora_server=None if server is None else replace(server, key=""),
        front_end=replace(cluster.front_end, engines_address=None),
        front_ends={
            f"front-end-{number}": FrontEndPlace(engines_address=next(addresses))
            for number in range(num_front_ends)
        },
        controller=ControllerConfig(address=next(addresses), engines_address=next(addresses)),
    )


def _free_addresses(count: int) -> list[str]:
    """Ports that are free now; a role that finds its own taken by then says so and ends."""
    with ExitStack() as held:
        socks = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{sock.getsockname()[1]}" for sock in socks]


def roles_of(cluster: ClusterConfig, file: int, http: int) -> list[Role]:
    """The controller, front ends that share the listening socket `http`, and instances, in this order.

    file: descriptor of the cluster's file.
    """
    config = ("--config", f"/dev/fd/{file}", "--parent", str(os.getpid()))
    serve = ("-m", "moe_lora.cli.main", "serve", *config)
    return [
        Role(name="controller", kind="controller", words=(*serve, "--role", "controller"), fds=(file,)),
        *(
            Role(
                name=name,
                kind=FRONT_END,
                words=(*serve, "--role", "front-end", "--name", name, "--listen-fd", str(http)),
                fds=(file, http),
            )
            for name in cluster.front_ends
        ),
        *(
            Role(
                name=f"instance-{number}",
                kind="instance",
                words=(
                    *("-m", "moe_lora.dist.worker", *config),
                    *("--role", "instance", "--name", f"instance-{number}"),
                ),
                fds=(file,),
            )
            for number in range(cluster.engine.num_instances)
        ),
    ]
