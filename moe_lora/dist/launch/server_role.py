# SPDX-License-Identifier: Apache-2.0
"""The role of a LoRA Server's rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.partition import Layout, Partition
from moe_lora.core.processes import worker_environment
from moe_lora.families import shape_of

from .cluster_file import use_devices
from .host_roles import say_started
from .roles import RESTART_CODE, JobPlace, end_for_restart, stop_on_signals

if TYPE_CHECKING:
    from moe_lora.core.shape import ModelShape
    from moe_lora.dist.host_workers.workers import HostWorkers
    from moe_lora.dist.lora_server.server_rank import ServerRank

THREADS_PER_RANK = 1
_BESIDE_WAITS = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""For unbounded waits on the device.  Lazy kernel loading may wait for an idle device, and streams beyond
CUDA's 8 default queues share a queue.
"""


def serve_lora_server(cluster: ClusterConfig, place: JobPlace, status: int | None = None) -> int:
    """Run one rank of the LoRA Server until SIGTERM or SIGINT; returns the exit code.

    Raises ConfigError, LoraServerError or AdapterError for a failed start.
    """
    config = cluster.lora_server_rank(place.on_host)
    if config.lora_server is None:
        raise ConfigError("the file has no lora_server section, so there is none to start; add one")
    layout = Layout.parse(config.lora_server.layout)
    if layout.num_ranks != place.num_ranks:
        raise ConfigError(
            f"lora_server.layout={layout} has {layout.num_ranks} ranks, but this job has {place.num_ranks} "
            f"processes; start it with torchrun --nproc-per-node {layout.num_ranks}, or change the layout"
        )
    os.environ.update(worker_environment(THREADS_PER_RANK))
    use_devices(config.device_shares)
    if config.lora_server.device_puts != "none":
        for name, value in _BESIDE_WAITS.items():
            os.environ.setdefault(name, value)
    return serve_rank(config, place, status)


def serve_rank(config: EngineConfig, place: JobPlace, status: int | None) -> int:
    """Build a rank and run until stopped; returns the exit code."""
    rank = build_rank(config, place.dist_rank, place.on_host)
    rank.on_restart = end_for_restart
    stop_on_signals(rank.stop, place)
    say_started(status)
    rank.run()
    return RESTART_CODE if rank.restarts else 0


def build_rank(config: EngineConfig, server_rank: int, local_rank: int | None = None) -> ServerRank:
    """A rank of the LoRA Server with host workers.  config: of the instances."""
    import torch

    from moe_lora.dist.lora_server.server_rank import ServerRank
    from moe_lora.engine.ranks.rank import resolved

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    hf_config = config.hf_config()
    config = resolved(config, hf_config)
    shape = shape_of(hf_config)
    assert config.lora_server is not None
    host = _host_workers_of_server(config, checked_partition(config, shape, config.lora_server))
    try:
        return ServerRank(config, shape, server_rank, host, local_rank)
    except BaseException:
        if host is not None:
            host.close()
        raise


def checked_partition(config: EngineConfig, shape: ModelShape, server: LoraServerConfig) -> Partition:
    """The server's partition.  Raises ConfigError for settings that don't go with divided sites."""
    numbers = config.expert_parallel, config.tensor_parallel
    partition = server.partition(shape, numbers)
    if not partition.shards:
        return partition
    if server.host_workers:
        raise ConfigError(
            f"lora_server.host_workers={server.host_workers} compute whole sites, and tensor_parallel="
            f"{numbers[1]} divides them; leave lora_server.host_workers out, or for a model with experts "
            f"give expert_parallel={numbers[1]} and lora_server.sites='experts'"
        )
    if config.emulation.step_profile is not None and shape.num_experts and numbers[0] == 1:
        raise ConfigError(
            f"emulation.step_profile has times of whole experts, and tensor_parallel={numbers[1]} divides "
            "the LoRA Server's; leave emulation.step_profile out, or give the same number as expert_parallel"
        )
    return partition


def _host_workers_of_server(config: EngineConfig, partition: Partition) -> HostWorkers | None:
    from moe_lora.adapters.host_store import HostStore
    from moe_lora.dist.deltas.session import FrameLayout
    from moe_lora.dist.host_workers.workers import HostWorkers, check_cores
    from moe_lora.engine.ranks.rank import DTYPES

    server = config.lora_server
    assert server is not None
    if not server.host_workers:
        return None
    num_ranks = Layout.parse(server.layout).num_ranks
    check_cores(server.host_workers, num_ranks, (), setting="lora_server.host_workers")
    shape = partition.shape
    has_attention = any(partition.serves(i) for i, site in enumerate(shape.sites) if not site.num_experts)
    if has_attention and config.expert_parallel > 1 and config.device != "cpu":
        raise ConfigError(
            f"lora_server.host_workers={server.host_workers} on {config.device} with expert_parallel="
            f"{config.expert_parallel}: each rank of an instance asks for attention's deltas, and one might "
            "get the host's and another the device's, whose bits differ; use lora_server.sites='experts'"
        )
    tokens = server.host_tokens_per_worker
    frames = FrameLayout(shape, DTYPES[config.dtype], tokens * max(1, shape.num_experts_per_token))
    return HostWorkers(frames, HostStore(server.store_dir), server.host_workers, tokens)
