# SPDX-License-Identifier: Apache-2.0
"""Devices of a host's roles: counts and assigns them, and hides foreign devices from a process.

`python -m moe_lora.dist.launch.devices` prints the number of CUDA devices.  The process keeper imports no
torch, so a child counts, with the roles' library and CUDA_VISIBLE_DEVICES; without
a CUDA driver 0 and no child.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
import sys
from dataclasses import replace

from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.devices import (
    DeviceShare,
    assign_devices,
    devices_text,
    narrowed,
)
from moe_lora.core.errors import ConfigError

logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = "libcuda.so.1"
_COUNT_S = 300.0


@functools.cache
def count_devices() -> int:
    """CUDA devices for the roles of this host; 0 without a driver, or with a torch for CPUs.

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
    """The cluster with a device for each rank on this host; unchanged on CPU.

    A placed cluster stays the same.  Raises ConfigError for too few devices and for impossible `devices`.
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
        config.num_instances,
        config.num_ranks,
        num_server_ranks,
        num_devices,
        cluster.devices,
        os.environ.get(VISIBLE),
    )
    return replace(cluster, devices=devices)


def log_devices(cluster: ClusterConfig) -> None:
    """Write the map of devices to the log."""
    if cluster.devices:
        visible = os.environ.get(VISIBLE)
        by = "" if visible is None else f" ({VISIBLE}={visible})"
        logger.info("devices%s: %s", by, devices_text(cluster.devices, count_devices()))


def use_devices(shares: tuple[DeviceShare, ...]) -> None:
    """Limit this process to these devices, before CUDA starts.  Rank r then has
    cuda:r, and foreign GPUs stay untouched.

    Raises ConfigError for a device beyond CUDA_VISIBLE_DEVICES.
    """
    if shares:
        os.environ[VISIBLE] = narrowed(os.environ.get(VISIBLE), [one.number for one in shares])


def main() -> None:
    import torch

    print(torch.cuda.device_count())


if __name__ == "__main__":
    main()
