"""What each of several instances on one machine gets of it."""

from __future__ import annotations

from dataclasses import replace

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError


def thread_share(num_threads: int | None, num_instances: int, num_cores: int) -> int:
    """CPU threads of each instance: as asked for, else an equal share of the cores, at least one.

    Processes with more threads than cores wait for each other's at every parallel step.  Raises ConfigError
    if more were asked for.
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


def instance_config(config: EngineConfig, index: int, adapters: tuple[tuple[str, str], ...]) -> EngineConfig:
    """The settings of one of `config.num_instances` instances.

    Seeds differ, or unseeded requests would get the same answers from each.
    """
    return replace(config, adapters=adapters, seed=config.seed + index, instance=f"instance-{index}")
