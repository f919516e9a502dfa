# SPDX-License-Identifier: Apache-2.0
"""Measured host times: the `host` section of a performance model's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moe_lora.config.engine import AUTO, EngineConfig
from moe_lora.config.json_file import FileContent, checked, read_object
from moe_lora.config.optional_parts import EmulationConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.processes import usable_cores
from moe_lora.policies.admission.host_start import HostStart, enough_workers
from moe_lora.timing.host_times import HostTimes, PartTime

VERSION = 1
WRITER = "moe-lora profile-steps MODEL_DIR --host-worker --out FILE"


def host_section(
    times: HostTimes,
    machine: Mapping[str, str],
    model: Mapping[str, Any],
    mean_errors: Mapping[str, float],
    samples: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The `host` section."""
    return {
        "version": VERSION,
        "machine": dict(machine),
        "model": dict(model),
        "times": asdict(times),
        "mean_errors": dict(mean_errors),
        "samples": [dict(sample) for sample in samples],
    }


class _Times(FileContent):
    worker: dict[str, PartTime]
    device: PartTime
    num_layers: int
    load_fixed_s: float
    load_bytes_per_s: float
    bytes_per_rank: float
    max_tokens: int
    max_rank: int


class _Section(FileContent):
    version: int
    machine: dict[str, str]
    model: dict[str, Any]
    times: _Times
    mean_errors: Any = None
    samples: Any = None


def read_host_times(
    path: str | Path, *, machine: Mapping[str, str] | None = None, model: Mapping[str, Any] | None = None
) -> HostTimes:
    """The times in a file of `moe-lora profile-steps --host-worker`.

    machine, model: required origin.  Raises ConfigError with file and fault.
    """
    section = _read(path)
    if section is None:
        raise ConfigError(f"{path} has no times of host workers; write it with `{WRITER}`")
    for name, wanted, found in (("machine", machine, section.machine), ("model", model, section.model)):
        for key, value in (wanted or {}).items():
            measured = found.get(key, "none" if key == "weights" else None)
            if measured != value:
                raise ConfigError(
                    f"{path} was measured on another {name}: {key} {measured!r}, and this one's is "
                    f"{value!r}; measure here with `{WRITER}`"
                )
    try:
        return HostTimes(**vars(section.times))
    except ConfigError as error:
        raise ConfigError(f"{path}: host.times: {error}") from error


def _read(path: str | Path) -> _Section | None:
    found = read_object(path, WRITER).get("host")
    if found is None:
        return None
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ConfigError(f"{path}: host.version={version!r} is not {VERSION}; measure again with `{WRITER}`")
    section: _Section = checked(path, _Section, found)
    return section


def emulated(times: HostTimes, emulation: EmulationConfig) -> HostTimes:
    """Times with emulated device, links and workers."""
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


def host_start(config: EngineConfig, times: HostTimes) -> HostStart | None:
    """Start of prompts on workers by the settings and times; None without workers.

    "auto" counts this host's cores: each engine rank keeps one.
    """
    c = config.host_tokens_per_worker or times.tokens_per_worker(times.max_rank)
    if config.host_workers == AUTO:
        parts = config.num_instances * config.num_ranks
        number = enough_workers(
            times,
            c,
            times.adapter(times.max_rank),
            max_tokens=config.max_num_batched_tokens,
            num_cores=len(config.host_cores) // parts or usable_cores() // parts - 1,
        )
    else:
        number = int(config.host_workers)
    if not number:
        return None
    budget_ms = config.host_tpot_budget_ms
    budget_s = None if budget_ms is None else budget_ms / 1e3
    return HostStart(times=times, num_workers=number, tokens_per_worker=c, tpot_budget_s=budget_s)


def routed_host_start(config: EngineConfig, path: str | Path) -> HostStart | None:
    """`host_start` without the instances' device and model.

    None also for "auto" with a CPU device's file or no times.  Raises ConfigError.
    """
    if not config.host_workers:
        return None
    if config.host_workers == AUTO:
        section = None if config.device == "cpu" else _read(path)
        if section is None or section.machine.get("device") == "cpu":
            return None
    return host_start(config, emulated(read_host_times(path), config.emulation))
