# SPDX-License-Identifier: Apache-2.0
"""The settings of this host's processes: their cluster file, their sockets, their shares of the host."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryFile

from moe_lora.config import ControllerConfig, EngineConfig, FrontEndPlace
from moe_lora.config.cluster import ClusterConfig, cluster_text
from moe_lora.core.errors import ConfigError


@contextmanager
def cluster_file(cluster: ClusterConfig) -> Iterator[int]:
    """A descriptor of the cluster's file.  No process's end leaves a file."""
    with TemporaryFile() as file:
        write_cluster(file.fileno(), cluster)
        yield file.fileno()


def write_cluster(file: int, cluster: ClusterConfig) -> None:
    """Write the cluster; processes read the file at start or on SIGHUP.

    Raises OSError without room, and keeps the old content.
    """
    text, before = cluster_text(cluster).encode(), os.pread(file, os.fstat(file).st_size, 0)
    try:
        if os.pwrite(file, text, 0) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        text = before
        os.pwrite(file, text, 0)
        raise
    finally:
        os.ftruncate(file, len(text))


def on_sockets(cluster: ClusterConfig, num_front_ends: int, folder: str) -> ClusterConfig:
    """The cluster with all addresses as sockets in a private folder.

    num_front_ends: 1: the front end starts the instances and includes the controller.
    """
    front_end = replace(cluster.front_end, engines_address=None)
    if num_front_ends == 1:
        alone = replace(front_end, engines_address=f"{folder}/engines")
        return replace(cluster, certificates=None, front_end=alone, front_ends={}, controller=None)
    return replace(
        cluster,
        certificates=None,
        front_end=front_end,
        front_ends={
            f"front-end-{number}": FrontEndPlace(engines_address=f"{folder}/front-end-{number}")
            for number in range(num_front_ends)
        },
        controller=ControllerConfig(address=f"{folder}/controller", engines_address=f"{folder}/engines"),
    )


def thread_share(num_threads: int | None, num_instances: int, num_cores: int) -> int:
    """CPU threads of each instance: as set, else an equal share of the cores, at least one.

    More threads than cores wait for each other at every parallel step: raises ConfigError.
    """
    share = max(1, num_cores // num_instances)
    if num_threads is not None and num_threads > share:
        raise ConfigError(
            f"num_threads={num_threads} for each of {num_instances} instances makes "
            f"{num_threads * num_instances} threads, but there are {num_cores} cores; choose at most {share} "
            "threads, or fewer instances"
        )
    return num_threads or share


def check_pool(config: EngineConfig) -> None:
    """Raises ConfigError for an adapter pool that `config.num_instances` on this machine can't keep."""
    pool = config.pool
    if pool is None:
        return
    if config.num_instances < 2:
        raise ConfigError(
            "an adapter pool is over several instances; give --instances 2 or more, or leave it out"
        )
    if pool.replicas > config.num_instances:
        raise ConfigError(
            f"pool.replicas={pool.replicas} is more than the {config.num_instances} instances; choose fewer"
        )
