# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of a device (fields: docs/reference/profiles.md)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moe_lora.config.json_file import Count, FileContent, Positive, Share, checked, read_object
from moe_lora.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Table:
    """seconds(b), piecewise linear through (batches[i], times_s[i]), extrapolated without negative times.

    Raises ConfigError unless batches increase from 1 or more, and times are positive and do not fall.
    """

    batches: tuple[float, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.batches) < 2 or len(self.batches) != len(self.times_s):
            raise ConfigError(
                f"{len(self.times_s)} times for {len(self.batches)} batches; give one a batch, two at least"
            )
        steps = zip(self.batches, self.batches[1:], strict=False)
        if self.batches[0] < 1 or any(not low < high for low, high in steps):
            raise ConfigError(f"batches={list(self.batches)} must increase from 1 or more")
        if not all(0 < time < math.inf for time in self.times_s):
            raise ConfigError(f"times {list(self.times_s)} must be finite and positive")
        if any(low > high for low, high in zip(self.times_s, self.times_s[1:], strict=False)):
            raise ConfigError(
                f"times {list(self.times_s)} must not fall while the batch grows; measure again"
            )

    def seconds(self, batch: float) -> float:
        """Time at this batch; 0 if empty."""
        if batch <= 0:
            return 0.0
        place = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        (low, high), (low_s, high_s) = (
            self.batches[place - 1 : place + 1],
            self.times_s[place - 1 : place + 1],
        )
        time_s = low_s + (high_s - low_s) * (batch - low) / (high - low)
        if batch < self.batches[0]:
            time_s = max(time_s, self.times_s[0] * batch / self.batches[0])
        return time_s


class MissingRateError(ConfigError):
    """The profile lacks a rate."""


MEANINGS = {"load_bytes_per_s": "copies from host to device", "net_bytes_per_s": "network between GPUs"}


class Gpu(FileContent):
    """A GPU, or a rank on CPUs.  Peak rates; None: unknown."""

    memory_gib: Positive
    instance_memory_share: Share
    """For weights, KV and adapters."""
    server_memory_share: Share
    """For adapters of a LoRA Server."""
    load_bytes_per_s: Positive | None = None
    """Host to device."""
    bytes_per_s: Positive | None = None
    flop_per_s: Positive | None = None
    net_bytes_per_s: Positive | None = None

    def needed(self, rate: str, profile: str) -> float:
        """The named rate.  Raises MissingRateError if unknown."""
        found: float | None = getattr(self, rate)
        if found is None:
            raise MissingRateError(
                f"profile {profile!r} has no {rate} ({MEANINGS[rate]}): nobody measured it there; give "
                f"--assume {rate}=BYTES, or a profile with the rate and its source"
            )
        return found

    @property
    def memory_bytes(self) -> float:
        """Total."""
        return self.memory_gib * 2**30


class RatedGpu(Gpu):
    """A GPU with known rates."""

    bytes_per_s: Positive
    flop_per_s: Positive


class Sizes(FileContent):
    """Sizes of a layer; a dense MLP is one expert, always chosen."""

    model: str = ""
    hidden_size: Count
    intermediate_size: Count
    num_experts: Count
    num_experts_per_token: Count
    lora_rank: Positive
    instance_gpus: Count
    value_bytes: Count
    weights: str = "none"
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    """None: not in the file."""
    context_tokens: Count = 512
    """KV of a row in the times of attention."""

    @property
    def row_inputs(self) -> float:
        """Values per row to the LoRA Server."""
        return float(self.num_experts_per_token * (self.hidden_size + self.intermediate_size))

    @property
    def row_outputs(self) -> float:
        """Values per row from the LoRA Server."""
        return float(self.num_experts_per_token * (self.hidden_size + 2 * self.intermediate_size))

    @property
    def row_pair_values(self) -> float:
        """A and B of gate, up and down, for a row."""
        width = self.hidden_size + self.intermediate_size
        return 3.0 * self.num_experts_per_token * width * self.lora_rank

    @property
    def row_flop(self) -> float:
        """FLOP of a row's base experts."""
        return 6.0 * self.num_experts_per_token * self.hidden_size * self.intermediate_size

    @property
    def expert_bytes(self) -> float:
        """Base weights of a layer's experts."""
        return 3.0 * self.value_bytes * self.num_experts * self.hidden_size * self.intermediate_size


Times = tuple[Annotated[float, Field(strict=True, allow_inf_nan=False)], ...]


class ServerTimes(FileContent):
    """Times of a layer's deltas, by batch."""

    receive: Times
    compute: Times
    send: Times


class BaseTimes(FileContent):
    """Times of a layer's base experts, and of the rest; None: derived."""

    experts: Times
    attention: Times | None = None


class Efficiency(FileContent):
    """Reached shares of the data sheet's rates."""

    memory: Share
    flop: Share
    net: Share | None = None


_Latency = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


class FixedTimes(FileContent):
    """Microseconds of a stage."""

    receive: _Latency = 0.0
    compute: _Latency = 0.0
    send: _Latency = 0.0
    attention: _Latency = 0.0
    sync_per_rank: _Latency = 0.0
    """For each further rank."""


Part = Literal[
    "decode", "prefill", "chunks", "adapters", "loads", "prefixes", "several GPUs", "LoRA Server", "moves"
]


class _Device(FileContent):
    """Fields of every profile."""

    name: Annotated[str, Field(min_length=1)]
    about: str = ""
    """Origin of the numbers."""
    ran: Annotated[dict[Part, str], Field(default_factory=dict)]
    """Plan parts with a run here, and the run."""
    models_run: tuple[str, ...] = ()
    """With a run of all layers."""
    fixed_us: FixedTimes = FixedTimes()
    sources: Annotated[dict[str, Any], Field(default_factory=dict)]


class MeasuredProfile(_Device):
    """Measurements of one model.  server_us: by EP degree x."""

    kind: Literal["tables"]
    gpu: Gpu
    taken_at: Sizes
    batches: Times
    server_us: Annotated[dict[Annotated[int, Field(ge=1)], ServerTimes], Field(min_length=1)]
    base_us: BaseTimes

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Tables by place in the file, e.g. "server_us.4.send"."""
        listed = {f"server_us.{ep}": stages for ep, stages in self.server_us.items()}
        found = {}
        for place, stages in {**listed, "base_us": self.base_us}.items():
            for name, times_us in stages:
                if times_us is not None:
                    try:
                        found[f"{place}.{name}"] = Table(self.batches, tuple(us * 1e-6 for us in times_us))
                    except ConfigError as error:
                        raise ConfigError(f"{place}.{name}: {error}") from error
        return found

    @model_validator(mode="after")
    def _right_tables(self) -> MeasuredProfile:
        assert self.tables
        return self


class RooflineProfile(_Device):
    """Rates, and reached shares of the rates."""

    kind: Literal["roofline"]
    gpu: RatedGpu
    efficiency: Efficiency


Profile = MeasuredProfile | RooflineProfile


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles in the package."""
    return tuple(sorted(Path(file.name).stem for file in _shipped().iterdir() if file.name.endswith(".json")))


def with_rates(profile: Profile, assumed: Mapping[str, float]) -> Profile:
    """The profile with further rates.  Raises ConfigError for a known rate or an unknown name."""
    for name, value in assumed.items():
        if name not in MEANINGS:
            raise ConfigError(f"assumed rate {name!r} is unknown; choose one of {', '.join(MEANINGS)}")
        known = getattr(profile.gpu, name)
        if known is not None:
            raise ConfigError(
                f"profile {profile.name!r} has {name}={known:g}; leave the assumption out, or change the "
                f"rate "
                "in a copy of the profile"
            )
        if not 0 < value < math.inf:
            raise ConfigError(f"assumed {name}={value} must be finite and above 0")
    return profile.model_copy(update={"gpu": profile.gpu.model_copy(update=dict(assumed))})


def _shipped() -> Any:
    return resources.files(__package__) / "profiles"


def read_profile(name_or_path: str | Path) -> Profile:
    """The shipped profile of this name, or the file's.  Raises ConfigError for impossible content."""
    path = name_or_path
    if str(path) in shipped_profiles():
        path = _shipped() / f"{path}.json"
    elif not Path(path).is_file():
        raise ConfigError(
            f"hardware {str(path)!r} is neither a readable file nor a shipped profile; "
            f"shipped are {', '.join(shipped_profiles())}; `moe-lora profile` writes one of this machine"
        )
    content = read_object(path, "moe-lora profile MODEL_DIR --out FILE")
    kinds = {"tables": MeasuredProfile, "roofline": RooflineProfile}
    if content.get("kind") not in kinds:
        raise ConfigError(
            f"{path}: kind={content.get('kind')!r} is unknown; choose one of {', '.join(kinds)}"
        )
    found: Profile = checked(path, kinds[content["kind"]], content)
    return found
