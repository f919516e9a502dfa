# SPDX-License-Identifier: Apache-2.0
"""The settings of this host's processes: cluster file, sockets, shares of the host, devices.

As a program, prints the number of CUDA devices: the process keeper imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryFile

from moe_lora.config import ControllerConfig, EngineConfig, FrontEndConfig, FrontEndPlace
from moe_lora.config.cluster import ClusterConfig, cluster_text, read_cluster
from moe_lora.config.devices import (
    DeviceShare,
    assign_devices,
    devices_text,
    narrowed,
)
from moe_lora.core.errors import ConfigError


@contextmanager
def cluster_file(cluster: ClusterConfig) -> Iterator[int]:
    """A descriptor of the cluster's nameless file."""
    with TemporaryFile() as file:
        write_cluster(file.fileno(), cluster)
        yield file.fileno()


def cluster_in(file: int) -> ClusterConfig:
    """The cluster in a file of `cluster_file`."""
    return read_cluster(f"/dev/fd/{file}")


def write_cluster(file: int, cluster: ClusterConfig) -> None:
    """Write the cluster, read by processes at start or on SIGHUP.

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


def set_front_end(file: int, front_end: FrontEndConfig) -> None:
    """Replace this section; as `write_cluster`."""
    write_cluster(file, replace(cluster_in(file), front_end=front_end))


def on_sockets(cluster: ClusterConfig, num_front_ends: int, folder: str) -> ClusterConfig:
    """The cluster with all addresses as sockets in a private folder.

    A single front end starts the instances and includes the controller.
    """
    engines = f"{folder}/engines"
    alone = replace(cluster.front_end, engines_address=engines)
    cluster = replace(
        cluster,
        certificates=None,
        front_end=alone,
        front_ends={},
        controller=None,
        controllers={},
        leadership=None,
    )
    if num_front_ends == 1:
        return cluster
    return replace(
        cluster,
        front_end=replace(alone, engines_address=None),
        front_ends={
            f"front-end-{number}": FrontEndPlace(engines_address=f"{folder}/front-end-{number}")
            for number in range(num_front_ends)
        },
        controller=ControllerConfig(address=f"{folder}/controller", engines_address=engines),
    )


def thread_share(num_threads: int | None, num_instances: int, num_cores: int) -> int:
    """CPU threads of each instance: as set, else an equal share of the cores, at least one.

    Raises ConfigError for more threads than cores.
    """
    share = max(1, num_cores // num_instances)
    if num_threads is not None and num_threads > share:
        raise ConfigError(
            f"num_threads={num_threads} for each of {num_instances} instances makes "
            f"{num_threads * num_instances} threads, but there are {num_cores} cores; choose at most {share} "
            "threads, or fewer instances"
        )
    return num_threads or share


def most_instances(cluster: ClusterConfig) -> int:
    """Instances that share this host."""
    return cluster.engine.num_instances if cluster.scaling is None else cluster.scaling.max_instances


def check_instances(cluster: ClusterConfig) -> None:
    """Raises ConfigError for a placement or a pool over too few instances, and outside of `scaling`."""
    scaling, number = cluster.scaling, cluster.engine.num_instances
    if scaling is not None and not scaling.min_instances <= number <= scaling.max_instances:
        raise ConfigError(
            f"{number} instances are outside of scaling.min_instances={scaling.min_instances} and "
            f"scaling.max_instances={scaling.max_instances}; choose a number (engine.num_instances) between"
        )
    setting = "--instances" if scaling is None else "scaling.min_instances"
    if cluster.front_end.placement is not None and number < 2:
        raise ConfigError(
            f"a placement is over several instances; give {setting} 2 or more, or leave the placement out"
        )
    check_pool(cluster.engine, setting)


def check_pool(config: EngineConfig, setting: str = "--instances") -> None:
    """Raises ConfigError for an impossible adapter pool.  setting: of the fewest instances."""
    pool = config.pool
    if pool is None:
        return
    if config.num_instances < 2:
        raise ConfigError(
            f"an adapter pool is over several instances; give {setting} 2 or more, or leave the pool out"
        )
    if pool.replicas > config.num_instances:
        raise ConfigError(
            f"pool.replicas={pool.replicas} is more than the {config.num_instances} instances; choose fewer, "
            f"or more {setting}"
        )


logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = "libcuda.so.1"
_COUNT_S = 300.0


@functools.cache
def count_devices() -> int:
    """CUDA devices of this host; 0 without a driver, or with a torch for CPUs.

    Raises ConfigError if torch fails.
    """
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_S, check=True)
        return int(done.stdout.split()[-1])
    except subprocess.TimeoutExpired as error:
        problem = f"no answer in {_COUNT_S:g} s"
        raise ConfigError(_not_counted(problem)) from error
    except (subprocess.CalledProcessError, IndexError, ValueError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise ConfigError(_not_counted(lines[-1] if lines else repr(error))) from error


def _not_counted(problem: str) -> str:
    return (
        f"torch can't count the CUDA devices of this host: {problem}; mend the driver, or use device: cpu "
        "(--device cpu)"
    )


def placed(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster with a device for each rank; unchanged on CPU.  Idempotent.

    Raises ConfigError for too few or impossible devices.
    """
    config, server = cluster.engine, cluster.lora_server
    if config.device == "cpu":
        return cluster
    num_devices = count_devices()
    if not num_devices and not cluster.devices:
        return cluster
    num_server_ranks = 0
    if server is not None:
        from moe_lora.core.partition import Layout

        num_server_ranks = Layout.parse(server.layout).num_ranks
    devices = assign_devices(
        most_instances(cluster),
        config.num_ranks,
        num_server_ranks,
        num_devices,
        cluster.devices,
        os.environ.get(VISIBLE),
    )
    return replace(cluster, devices=devices)


def log_devices(cluster: ClusterConfig) -> None:
    if cluster.devices:
        visible = os.environ.get(VISIBLE)
        by = "" if visible is None else f" ({VISIBLE}={visible})"
        logger.info("devices%s: %s", by, devices_text(cluster.devices, count_devices()))


def use_devices(shares: tuple[DeviceShare, ...]) -> None:
    """Limit this process to these devices, before CUDA starts: rank r has cuda:r.

    Raises ConfigError for an invisible device.
    """
    if shares:
        os.environ[VISIBLE] = narrowed(os.environ.get(VISIBLE), [one.number for one in shares])


def main() -> None:
    import torch

    print(torch.cuda.device_count())


if __name__ == "__main__":
    main()
