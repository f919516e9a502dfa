# SPDX-License-Identifier: Apache-2.0
"""Configuration of a simulated system, and prefix hits."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol, TypeAlias

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.config.settings import Settings, setting
from moe_lora.core.errors import ConfigError
from moe_lora.policies.routing.routing import LeastOutstanding, Router
from moe_lora.sim.prefill_first import PrefillConfig
from moe_lora.timing.step_model import StepModel

from .running import SimRequest


class PrefixHits(Protocol):
    """Prefix hits; a request computes at least one prompt token."""

    def match(self, request: SimRequest) -> int:
        """Prompt tokens with KV on the instance."""
        ...

    def add(self, request: SimRequest, free_tokens: float) -> None:
        """The request has ended.  free_tokens: room for cached KV."""
        ...


@dataclass(frozen=True, kw_only=True)
class StatedHits:
    """Every prompt finds this share of its tokens."""

    share: float

    def match(self, request: SimRequest) -> int:
        return min(int(self.share * request.prompt_tokens), request.prompt_tokens - 1)

    def add(self, request: SimRequest, free_tokens: float) -> None:
        """A stated share depends on no request."""


class BlockHits:
    """Finds the longest prefix in blocks of ended requests with the same adapter.

    Evicts least recently used blocks, down to the KV without running requests.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[tuple[str | None, int], None] = OrderedDict()

    def match(self, request: SimRequest) -> int:
        keys = ((request.adapter, block) for block in request.hash_ids)
        found = list(takewhile(self._blocks.__contains__, keys))
        for key in reversed(found):
            self._blocks.move_to_end(key)
        return max(0, min(len(found) * self._block_tokens, request.prompt_tokens - 1))

    def add(self, request: SimRequest, free_tokens: float) -> None:
        for block in reversed(request.hash_ids):  # evicts the first block last
            key = request.adapter, block
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) * self._block_tokens > free_tokens:
            self._blocks.popitem(last=False)


AdapterBytes: TypeAlias = float | Mapping[str, float]


def bytes_of(adapter_bytes: AdapterBytes, name: str) -> float:
    """Bytes of the adapter.  Raises ConfigError if unknown."""
    if not isinstance(adapter_bytes, Mapping):
        return adapter_bytes
    if name not in adapter_bytes:
        raise ConfigError(
            f"adapter_bytes has no {name!r}, which a request asks for; name it, or give one number"
        )
    return adapter_bytes[name]


def _positive(place: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{place}={value} brings nothing; choose more than 0")


def _not_negative(place: str, value: float) -> None:
    if not value >= 0:
        raise ConfigError(f"{place}={value} must be 0 or more")


class StepRows(Protocol):
    """The token rows of a step."""

    num_rows: int
    """Decode rows."""
    num_with_adapter: int
    """Requests with an adapter."""
    num_prompt_tokens: int
    num_prompt_pairs: int
    """Pairs of a prompt token and an attended token."""

    @property
    def num_prompts(self) -> int: ...


class LayerModel(Protocol):
    """Times of equal layers, including prompt tokens."""

    def layer_s(self, step: StepRows) -> tuple[float, float]:
        """Seconds of a layer, and busy seconds of the LoRA Server."""
        ...


@dataclass(frozen=True, kw_only=True)
class InstanceConfig(Settings):
    """An LLM instance, with one of profile, steps and layers."""

    profile: StepProfile | None = None
    """Of one of num_layers equal layers."""
    num_layers: int = setting(1, least=1)
    steps: StepModel | None = None
    """Times of whole steps by rank."""
    layers: LayerModel | None = None
    """Layer times with prompts."""
    max_num_seqs: int = setting(256, least=1)
    kv_tokens: float | None = setting(None, least=1)
    """None: unlimited."""
    prefill: StageTime | None = None
    """Time of a step's prompt tokens; None, without `steps` and `layers`: computed elsewhere."""
    max_num_batched_tokens: int = setting(2048, least=1)
    prefix_hits: Callable[[], PrefixHits] | None = None
    """None: no reuse."""
    shortest_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(one is not None for one in (self.profile, self.steps, self.layers)) != 1:
            raise ConfigError(
                "an instance needs a profile of its layers, times of its layers, or a model of its steps; "
                "give one"
            )
        if self.layers is not None and self.prefill is not None:
            raise ConfigError("layers has the time of prompts; leave prefill out")
        if self.steps is not None and (self.prefill is not None or self.num_layers != 1):
            raise ConfigError(
                "steps has the time of prompts and of all layers; leave prefill and num_layers out"
            )

    @property
    def has_prompts(self) -> bool:
        return self.prefill is not None or self.profile is None


@dataclass(frozen=True, kw_only=True)
class LocalConfig(Settings):
    """Every instance has `capacity` slots."""

    capacity: int = setting(least=1)
    load_bytes_per_s: float = setting(math.inf, check=_positive)
    """inf: at once."""
    fetch_bytes_per_s: float = setting(math.inf, check=_positive)
    """From another host."""
    starvation_s: float = setting(5.0, check=_not_negative)
    """After this wait younger requests stop."""
    blocking: bool = True
    """A load blocks steps, as in vLLM's S-LoRA."""
    prefetched: Sequence[str] = ()
    """Resident at the start, the last evicted first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.prefetched) > self.capacity:
            raise ConfigError(
                f"prefetched={len(self.prefetched)} adapters exceed capacity={self.capacity}; name fewer"
            )


@dataclass(frozen=True, kw_only=True)
class SimLoraServerConfig(LocalConfig):
    """One LoRA Server of `capacity` slots for all instances; load_bytes_per_s: of all GPUs."""

    num_stages: int = setting(1, least=1)
    """y of EPx-PPy."""
    layer_wise: bool = True
    control_s: float = setting(0.001, least=0)
    """Round trip of a lease; steps do not wait."""


Planner: TypeAlias = Callable[[Mapping[str, float], float], Mapping[str, Iterable[tuple[int, float]]]]
"""(tokens per adapter in the last interval, seconds) -> {adapter: [(instance, phi), ...]}.  The first call
has neither.
"""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Settings):
    """Placement renewed during a run."""

    planner: Callable[[], Planner]
    """Called every interval_s."""
    interval_s: float = setting(30.0, above=0)
    mean_output_tokens: float = setting(128.0, above=0)
    """Before any observation."""


@dataclass(frozen=True, kw_only=True)
class PromptInstances:
    """Instances with adapters of their own."""

    instance: InstanceConfig
    adapters: LocalConfig


@dataclass(frozen=True, kw_only=True)
class SystemConfig(Settings):
    """Instances of equal kind and their adapters."""

    num_instances: int = setting(least=1)
    instance: InstanceConfig
    adapters: LocalConfig | SimLoraServerConfig
    adapter_bytes: AdapterBytes = 0.0
    lora_ranks: Mapping[str, int] = field(default_factory=dict)
    """For step times; unnamed adapters count as base model."""
    router: Callable[[], Router] = LeastOutstanding
    placement: PlacementConfig | None = None
    """For a `PhiRouting` router; None: every host has all adapters."""
    prefill: PrefillConfig | None = None
    """Instances for prompts; None: each instance does both."""
    prompts: PromptInstances | None = None
    """Prompt instances beside a LoRA Server; None: as the others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.instance.steps is not None and isinstance(self.adapters, SimLoraServerConfig):
            raise ConfigError("steps has the deltas in it; with a LoRA Server give a profile of the layers")
        if self.placement is not None and isinstance(self.adapters, SimLoraServerConfig):
            raise ConfigError("a LoRA Server has all adapters; leave the placement out")
        if self.prefill is None:
            return
        if isinstance(self.adapters, SimLoraServerConfig) == (self.prompts is None):
            raise ConfigError("beside a LoRA Server, and only there, give prompt instances of their own")
        if self.placement is not None:
            raise ConfigError("prefill instances are simulated without placement")
        if not self.instance.has_prompts:
            raise ConfigError("another device computes the prompts; leave prefill out")

    def parts_of(self, index: int) -> tuple[InstanceConfig, LocalConfig | SimLoraServerConfig]:
        """An instance, and its adapters."""
        if self.prompts is None or self.prefill is None or index >= self.prefill.num_instances:
            return self.instance, self.adapters
        return self.prompts.instance, self.prompts.adapters
