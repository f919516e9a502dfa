"""A whole cluster on this host: its file, and its roles as processes (`host_roles` keeps them running)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryFile

from moe_lora.config import ControllerConfig, FrontEndPlace, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig, cluster_text

from .host_roles import FRONT_END, Role


@contextmanager
def cluster_file(cluster: ClusterConfig) -> Iterator[int]:
    """A descriptor of the cluster's file.

    The file has no name: nothing stays of it however the processes end that have it open.
    """
    with TemporaryFile() as file:
        file.write(cluster_text(cluster).encode())
        file.flush()
        yield file.fileno()


def on_sockets(
    cluster: ClusterConfig, num_front_ends: int, server: LoraServerConfig | None, folder: str
) -> ClusterConfig:
    """The same cluster with all its addresses sockets in a folder that only this user enters.

    server: the LoRA Server that runs here, None if there is none.
    """
    return replace(
        cluster,
        lora_server=server,
        front_end=replace(cluster.front_end, engines_address=None),
        front_ends={
            f"front-end-{number}": FrontEndPlace(engines_address=f"{folder}/front-end-{number}")
            for number in range(num_front_ends)
        },
        controller=ControllerConfig(address=f"{folder}/controller", engines_address=f"{folder}/engines"),
    )


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
                    *("-m", "moe_lora.dist.launch.run_role", *config),
                    *("--role", "instance", "--name", f"instance-{number}"),
                ),
                fds=(file,),
            )
            for number in range(cluster.engine.num_instances)
        ),
    ]
