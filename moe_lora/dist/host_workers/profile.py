"""What one machine's host workers, device and loads take, as a part of a performance model's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moe_lora.config.json_file import FileContent, checked, read_object
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import cpu_model
from moe_lora.core.shape import ModelShape
from moe_lora.policies.host_start import HostTimes, PartTime

VERSION = 1
WRITER = "moe-lora profile-steps MODEL_DIR --host-worker --out FILE"
_SHAPE = ("num_layers", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_token")


def machine_of(device: torch.device) -> dict[str, str]:
    """What a profile's times depend on: the names of processor and device."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"cpu": cpu_model() or "unknown", "device": named}


def model_of(shape: ModelShape, dtype: torch.dtype) -> dict[str, int | str]:
    """The sizes of a model that times depend on."""
    return {name: getattr(shape, name) for name in _SHAPE} | {"dtype": str(dtype).removeprefix("torch.")}


def host_section(
    times: HostTimes,
    machine: Mapping[str, str],
    model: Mapping[str, Any],
    mean_errors: Mapping[str, float],
    samples: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What stands as `host` in the file.  mean_errors: of what was fitted, relative; samples: as measured."""
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

    machine, model: those that it must have been measured with (`machine_of`, `model_of`); None: any.  Raises
    ConfigError naming the file and what is wrong with it.
    """
    content = read_object(path, WRITER)
    if content.get("host") is None:
        raise ConfigError(f"{path} has no times of host workers; write it with `{WRITER}`")
    version = content["host"].get("version") if isinstance(content["host"], dict) else None
    if version != VERSION:
        raise ConfigError(f"{path}: host.version={version!r} is not {VERSION}; measure again with `{WRITER}`")
    section: _Section = checked(path, _Section, content["host"])
    for name, wanted, found in (("machine", machine, section.machine), ("model", model, section.model)):
        for key, value in (wanted or {}).items():
            if found.get(key) != value:
                raise ConfigError(
                    f"{path} was measured on another {name}: {key} {found.get(key)!r}, and this one's is "
                    f"{value!r}; measure here with `{WRITER}`"
                )
    try:
        return HostTimes(**vars(section.times))
    except ConfigError as error:
        raise ConfigError(f"{path}: host.times: {error}") from error
