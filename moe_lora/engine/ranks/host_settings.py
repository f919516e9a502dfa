"""Host workers as this machine and its profile have them: how many, c, and when their use pays."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from moe_lora.config import EngineConfig
from moe_lora.config.engine import AUTO, EmulationConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.processes import usable_cores
from moe_lora.core.shape import ModelShape
from moe_lora.dist.host_workers.profile import WRITER, machine_of, model_of, read_host_times
from moe_lora.dist.host_workers.workers import check_cores
from moe_lora.policies.host_start import TOKENS_PER_WORKER, HostStart, HostTimes, PartTime, enough_workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostSettings:
    """num_workers: none if 0.  tokens_per_worker: c.  cores: one for each; empty: any.  rule: when a prompt
    begins on them; None: whenever its adapter is loading."""

    num_workers: int = 0
    tokens_per_worker: int = TOKENS_PER_WORKER
    cores: tuple[int, ...] = ()
    rule: HostStart | None = None


def host_settings(
    config: EngineConfig,
    *,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    local_sites: Collection[str],
    dist_rank: int = 0,
) -> HostSettings:
    """What the settings ask for of a rank, "auto" and c chosen by the profile that they name; c is that of
    the largest LoRA rank measured.  local_sites: those that the rank computes itself.

    Raises ConfigError for more workers than cores or cores that this host has not, for a profile that is
    another machine's or model's, and for "auto" without one.
    """
    if not config.host_workers:
        return HostSettings()
    if config.host_workers == AUTO and device.type == "cpu":
        logger.info("host_workers=auto: none, the device is the same cores")
        return HostSettings()
    if config.performance_model is None:
        if config.host_workers == AUTO:
            raise ConfigError(
                f"host_workers={AUTO} needs the times of this machine; give a performance_model that was "
                f"written by `{WRITER}`, or a number of workers"
            )
        c, number = config.host_tokens_per_worker or TOKENS_PER_WORKER, int(config.host_workers)
        return HostSettings(number, c, _own_cores(config, number, dist_rank))
    measured = read_host_times(
        config.performance_model, machine=machine_of(device), model=model_of(shape, dtype)
    )
    times = emulated(measured, config.emulation)
    local = {"+".join(site.modules) for site in shape.sites if site.name in local_sites}
    times = replace(times, worker={name: time for name, time in times.worker.items() if name in local})
    c = config.host_tokens_per_worker or times.tokens_per_worker(times.max_rank)
    number = _chosen(config, times, c) if config.host_workers == AUTO else int(config.host_workers)
    if not number:
        return HostSettings()
    rule = HostStart(times=times, num_workers=number, tokens_per_worker=c)
    return HostSettings(number, c, _own_cores(config, number, dist_rank), rule)


def emulated(times: HostTimes, emulation: EmulationConfig) -> HostTimes:
    """The times with those of the device, the links and the workers that are emulated."""
    if emulation.step_profile is not None:
        prefill = emulation.step_profile.prefill
        times = replace(times, device=PartTime(fixed_s=prefill.fixed_s, per_token_s=prefill.per_row_s))
    if emulation.load_gb_per_s is not None:
        times = replace(times, load_bytes_per_s=min(times.load_bytes_per_s, 1e9 * emulation.load_gb_per_s))
    slow = {
        modules: PartTime(**{name: emulation.host_slowdown * value for name, value in vars(time).items()})
        for modules, time in times.worker.items()
    }
    return replace(times, worker=slow)


def _chosen(config: EngineConfig, times: HostTimes, tokens_per_worker: int) -> int:
    """The number of workers that "auto" stands for: each rank of an engine keeps a core."""
    parts = config.num_instances * config.expert_parallel
    spare = len(config.host_cores) // parts or usable_cores() // parts - 1
    number = enough_workers(
        times,
        tokens_per_worker,
        times.adapter(times.max_rank),
        max_tokens=config.max_num_batched_tokens,
        num_cores=spare,
    )
    logger.info(
        "host_workers=auto: %d, each for %d tokens in time; %d cores are spare",
        *(number, tokens_per_worker, spare),
    )
    return number


def _own_cores(config: EngineConfig, num_workers: int, dist_rank: int) -> tuple[int, ...]:
    """Of host_cores those of this rank's workers; the number at the end of its name tells the instance."""
    num_instances, ranks = config.num_instances, config.expert_parallel
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
