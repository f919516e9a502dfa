# SPDX-License-Identifier: Apache-2.0
"""Host workers of this machine by its profile: number, c, and rule of use."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moe_lora.config import EngineConfig
from moe_lora.config.engine import AUTO
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import cpu_model
from moe_lora.core.shape import ModelShape
from moe_lora.policies.admission.host_start import HostLoads, HostStart

if TYPE_CHECKING:
    from moe_lora.adapters.host_store import HostStore
    from moe_lora.dist.deltas.stream_backend import Stream
    from moe_lora.dist.host_workers.workers import HostWorkers

    from .rank import Rank

logger = logging.getLogger(__name__)
TOKENS_PER_WORKER = 32
"""c without a profile."""
_SHAPE = ("num_layers", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_token")


def machine_of(device: torch.device) -> dict[str, str]:
    """Processor and device, for a profile's times."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"cpu": cpu_model() or "unknown", "device": named}


def model_of(shape: ModelShape, dtype: torch.dtype, weights: str = "none") -> dict[str, int | str]:
    """Sizes of a model on which times depend.  weights: the weight format."""
    sizes: dict[str, int | str] = {name: getattr(shape, name) for name in _SHAPE}
    return sizes | {"dtype": str(dtype).removeprefix("torch."), "weights": weights}


@dataclass(frozen=True)
class HostSettings:
    """tokens_per_worker: c.  tokens_per_step: see `HostStart`.  cores: one per worker; empty: any.  rule: for
    the start of prompts on workers; None: during the adapter's load.
    """

    num_workers: int = 0
    tokens_per_worker: int = TOKENS_PER_WORKER
    tokens_per_step: int = 0
    cores: tuple[int, ...] = ()
    rule: HostStart | None = None

    def loads(self, max_num_batched_tokens: int) -> HostLoads:
        """Decides when prompts begin on the workers."""
        return HostLoads(self.rule, max_num_batched_tokens)

    def workers(self, rank: Rank, store: HostStore | None) -> HostWorkers | None:
        """The rank's started workers, if any.

        Raises ConfigError if the LoRA Server computes all sites, EngineDeadError.
        """
        from moe_lora.dist.deltas.session import FrameLayout
        from moe_lora.dist.host_workers.workers import HostWorkers, WorkerTimes

        if not self.num_workers:
            return None
        config = rank.config
        if not rank.local_sites:
            raise ConfigError(
                f"host_workers={self.num_workers} would have nothing to compute: the LoRA Server computes "
                "all sites; set lora_server.host_workers instead"
            )
        stream = stream_of(rank.device)
        if stream is not None and config.num_ranks > 1:
            raise ConfigError(
                f"host_workers={self.num_workers} and {config.num_ranks} ranks do not go together on "
                "CUDA: rank 0 would take a step's tokens before it hears of an error at another rank; "
                "leave one out"
            )
        tokens = self.tokens_per_worker
        max_rows = tokens * max(1, rank.shape.num_experts_per_token)
        layout = FrameLayout(rank.shard.shape, rank.dtype, max_rows, rank.divides_adapters)
        times = WorkerTimes(slowdown=config.emulation.host_slowdown)
        return HostWorkers(
            layout, store, self.num_workers, tokens, cores=self.cores, times=times, stream=stream
        )


def host_settings(
    config: EngineConfig,
    *,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    local_sites: Collection[str],
    dist_rank: int = 0,
) -> HostSettings:
    """A rank's host workers; the profile resolves "auto", and gives c of the largest measured rank.

    Raises ConfigError for more workers than cores, absent cores, a profile of another machine or model,
    "auto" or host_tpot_budget_ms without a profile, and a budget below one row.
    """
    if not config.host_workers:
        return HostSettings()
    if config.host_workers == AUTO and device.type == "cpu":
        logger.info("host_workers=auto: none, the device is the same cores")
        return HostSettings()
    from moe_lora.dist.host_workers.profile import WRITER, emulated, host_start, read_host_times

    if config.performance_model is None:
        if config.host_workers == AUTO:
            raise ConfigError(
                f"host_workers={AUTO} needs the times of this machine; give a performance_model that was "
                f"written by `{WRITER}`, or a number of workers"
            )
        if config.host_tpot_budget_ms is not None:
            raise ConfigError(
                f"host_tpot_budget_ms={config.host_tpot_budget_ms:g} needs the times of this machine; give a "
                f"performance_model that was written by `{WRITER}`, or leave the budget out"
            )
        c, number = config.host_tokens_per_worker or TOKENS_PER_WORKER, int(config.host_workers)
        in_step = config.host_tokens_per_step or number * c
        return HostSettings(number, c, in_step, _own_cores(config, number, dist_rank))
    model = model_of(shape, dtype, config.weights_name())
    measured = read_host_times(config.performance_model, machine=machine_of(device), model=model)
    times = emulated(measured, config.emulation)
    local = {"+".join(site.modules) for site in shape.sites if site.name in local_sites}
    times = replace(times, worker={name: time for name, time in times.worker.items() if name in local})
    rule = host_start(config, times)
    number = 0 if rule is None else rule.num_workers
    if config.host_workers == AUTO:
        logger.info("host_workers=auto: %d", number)
    if rule is None:
        return HostSettings()
    cores = _own_cores(config, number, dist_rank)
    in_step = config.host_tokens_per_step or rule.tokens_per_step(config.max_num_batched_tokens)
    return HostSettings(number, rule.tokens_per_worker, in_step, cores, rule)


def _own_cores(config: EngineConfig, num_workers: int, dist_rank: int) -> tuple[int, ...]:
    """This rank's part of host_cores, by the number at the end of the instance's name."""
    from moe_lora.dist.host_workers.workers import check_cores

    num_instances, ranks = config.num_instances, config.num_ranks
    check_cores(num_workers, num_instances * ranks, config.host_cores)
    share, number = len(config.host_cores) // (num_instances * ranks), 0
    if share and num_instances > 1:
        end_of_name = config.instance.rpartition("-")[2]
        if not end_of_name.isdecimal():
            raise ConfigError(
                f"instance {config.instance!r} can't tell which of host_cores={config.host_cores} are its "
                f"own; let its name end in a number, such as {config.instance}-0, or leave host_cores out"
            )
        number = int(end_of_name) % num_instances
    first = (number * ranks + dist_rank) * share
    return config.host_cores[first : first + min(share, num_workers)]


def stream_of(device: torch.device) -> Stream | None:
    """The stream for calls to host workers; None on CPU."""
    if device.type != "cuda":
        return None
    from moe_lora.dist.deltas.stream_backend import CudaStream

    return CudaStream(device)
