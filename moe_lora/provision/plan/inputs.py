# SPDX-License-Identifier: Apache-2.0
"""Inputs of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lora.config.plan import PlanGoals
from moe_lora.config.settings import settings_of
from moe_lora.core.errors import ConfigError
from moe_lora.core.partition import Layout
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.core.weight_format import UNQUANTISED, WeightFormat
from moe_lora.provision.device_profile import Profile
from moe_lora.provision.lower_bound import Work, WorkSum
from moe_lora.provision.replayed.system_config import BlockHits, PrefixHits, StatedHits
from moe_lora.workload.statistics import Lengths
from moe_lora.workload.traces.records import HASH_BLOCK_TOKENS, TraceRequest

from .memory import BLOCK_TOKENS, AdapterMix, base_bytes, shard_of
from .stages import PromptsPerRow

_FROM_TRACE = {
    "rate_per_s": "change --request-rate",
    "output_tokens": "it is the trace's mean",
    "context_tokens": "it is the trace's mean",
}
CHUNK_TOKENS = 512
"""Prompt tokens of a step; a prompt reads its adapter once a step."""
MOST_BLOCKS = 1 << 20
"""Remembered blocks of prompts; at most twice as many, in 200 MB."""


@dataclass(frozen=True, kw_only=True)
class PromptLoad:
    """Prompts of a load, computed by the instances."""

    prompt_tokens: float
    """Mean."""
    hit_share: float
    """Share of prompt tokens in an endless cache."""
    p95_computed: float
    """Computed tokens of the 95th-percentile prompt."""
    output_tokens: float
    """Mean."""
    work: Work
    """For the lower bound."""
    computed_pairs: float
    """Mean pairs of a computed prompt token and an attended token, counted apart from the bound's."""
    stated: bool
    """hit_share comes from an option."""
    longest: int
    """Most tokens of prompt and answer."""

    @property
    def computed_tokens(self) -> float:
        """Mean of a request."""
        return self.prompt_tokens * (1 - self.hit_share)

    @property
    def longest_kv_tokens(self) -> float:
        """For the longest request; the plan's file rounds."""
        return 1.002 * self.longest + BLOCK_TOKENS

    @property
    def per_row(self) -> PromptsPerRow:
        """Prompt work per decode row of a mean step."""
        reads = 1 + self.computed_tokens / CHUNK_TOKENS
        parts = self.computed_tokens, reads, self.computed_pairs
        return PromptsPerRow(*(part / self.output_tokens for part in parts))

    @property
    def prefix_hits(self) -> Callable[[], PrefixHits] | None:
        """Makes a simulated instance's prefix hits; None without hits."""
        if self.stated:
            return partial(StatedHits, share=self.hit_share)
        return partial(BlockHits, HASH_BLOCK_TOKENS) if self.hit_share else None


class PromptCount:
    """Counts a trace's prompts, request by request, in bounded memory.

    stated: share of prompt tokens in computed prefixes; None: by hashes of the latest MOST_BLOCKS or more.
    by_adapter: prefixes are of one adapter.
    """

    def __init__(self, stated: float | None = None, *, by_adapter: bool = True) -> None:
        self._stated, self._by_adapter = stated, by_adapter
        self._tokens = self._outputs = self._pairs = self._longest = 0
        self._computed, self._work = Lengths(), WorkSum()
        self._blocks: set[int] = set()
        self._older = self._blocks

    def add(self, one: TraceRequest) -> None:
        """Count a request."""
        prompt, output = one.prompt_tokens, one.output_tokens
        stated = self._stated
        cached = self._num_cached(one) * HASH_BLOCK_TOKENS if stated is None else int(stated * prompt)
        hit = min(cached, prompt - 1)
        self._tokens += prompt
        self._outputs += output
        self._pairs += (prompt - hit) * (prompt + hit + 1)
        self._longest = max(self._longest, prompt + output)
        self._computed.add(prompt - hit)
        self._work.add(prompt, hit, output)

    def _num_cached(self, one: TraceRequest) -> int:
        adapter = one.adapter if self._by_adapter else None
        keys = [hash((adapter, block)) for block in one.hash_ids]
        found = sum(1 for _ in takewhile(lambda key: key in self._blocks or key in self._older, keys))
        self._blocks.update(keys)
        if len(self._blocks) > MOST_BLOCKS:
            self._blocks, self._older = set(), self._blocks
        return found

    def load(self) -> PromptLoad:
        """Of the counted prompts; one at least."""
        computed = self._computed.statistics()
        number = self._computed.counts.total()
        return PromptLoad(
            prompt_tokens=self._tokens / number,
            hit_share=(self._tokens - self._computed.total) / self._tokens,
            p95_computed=computed.p95,
            output_tokens=self._outputs / number,
            work=self._work.mean(),
            computed_pairs=self._pairs / 2 / number,
            stated=self._stated is not None,
            longest=self._longest,
        )


@dataclass(frozen=True)
class SizedCluster:
    """Instances beside a LoRA Server, or coupled, with `slots` adapters on each.

    prefill_instances: for prompts alone; the others have the answers.  step_tokens: a step's budget; 0: the
    largest within the TPOT SLO.
    """

    layout: Layout | None
    num_instances: int
    slots: int = 0
    prefill_instances: int = 0
    step_tokens: int = 0

    @property
    def num_decoding(self) -> int:
        """Instances with decode rows."""
        return self.num_instances - self.prefill_instances

    def num_gpus(self, instance_gpus: int) -> int:
        """Total GPUs."""
        return self.num_instances * instance_gpus + (self.layout.num_ranks if self.layout else 0)

    def __str__(self) -> str:
        beside = f"{self.slots} adapters beside the weights" if self.layout is None else str(self.layout)
        of = f" ({self.prefill_instances} for prompts)" if self.prefill_instances else ""
        return f"{self.num_instances} instances{of} and {beside}"


@dataclass(frozen=True, kw_only=True)
class PlanInputs(PlanGoals):
    """A model, adapters, a load, a device and two SLOs.

    Raises ConfigError for impossible numbers.
    """

    model: str
    shape: ModelShape
    mix: AdapterMix
    profile: Profile
    instance_gpus: int
    probabilities: NDArray[np.float64] = field(repr=False)
    """[N], by adapter."""
    output_tokens: float
    """Mean."""
    context_tokens: float
    """Mean."""
    weights: WeightFormat = UNQUANTISED
    rate_per_s: float | None = None
    """Mean."""
    prompts: PromptLoad | None = None
    """None: computed by another device (InfiniLoRA section 2.1)."""
    assumed: Mapping[str, float] = field(default_factory=dict)
    """The user's rates for the profile."""
    popularity_source: str = ""
    trace_rate_per_s: float | None = None
    """The trace's mean if rate_per_s is its mean or peak."""
    adapters_are_traces: bool = False
    """Probabilities are the trace's."""
    adapter_share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("output_tokens", "context_tokens", "rate_per_s", "instance_gpus"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                where = _FROM_TRACE.get(name, f"change --{name.replace('_', '-')}")
                raise ConfigError(f"{name}={value} must be a finite number above 0; {where}")
        longest, most = 0 if self.prompts is None else self.prompts.longest, self.shard.shape.max_position
        if longest > most:
            raise ConfigError(
                f"the trace's longest request has {longest} tokens with its answer, and {self.model} takes "
                f"max_position={most}; leave such requests out of the trace"
            )
        if not 0 < self.adapter_share <= 1:
            raise ConfigError(f"adapter_share={self.adapter_share} must be above 0 and at most 1")
        if self.rate_per_s is None and self.global_batch is None:
            raise ConfigError(
                "the load is unknown: the trace has no arrival times, or one only; "
                "give --request-rate or --global-batch"
            )

    @property
    def adapter_bytes(self) -> float:
        return self.mix.adapter_bytes(self.shape)

    @cached_property
    def shard(self) -> ModelShard:
        return shard_of(self.shape, self.instance_gpus)

    @property
    def kv_token_bytes(self) -> int:
        """Over an instance's GPUs."""
        return self.instance_gpus * self.shard.shape.kv_bytes_per_token()

    @property
    def coupled_adapter_bytes(self) -> float:
        """Mean, in whole pages a layer, over an instance's GPUs."""
        local, ep = self.shard.shape, self.shard.expert_parallel
        page_bytes = BLOCK_TOKENS * local.kv_bytes_per_token()
        return self.instance_gpus * self.mix.adapter_bytes(local, ep, page_bytes)

    @property
    def weight_bytes(self) -> float:
        return base_bytes(self.shape, self.weights, self.instance_gpus // self.shard.tensor_parallel)

    def to_json(self) -> dict[str, Any]:
        """All fields except arrays, as JSON values."""
        own = ("model", "instance_gpus", "rate_per_s", "output_tokens", "context_tokens")
        names = (*own, *settings_of(PlanGoals), "popularity_source", "adapter_share")
        return {
            **{name: getattr(self, name) for name in names},
            "num_adapters": len(self.probabilities),
            "lora_ranks": [list(pair) for pair in self.mix.ranks],
            "adapter_form": self.mix.form,
            "prompts": None if self.prompts is None else asdict(self.prompts),
            "hardware": self.profile.name,
            "hardware_about": self.profile.about,
            "assumed": dict(self.assumed),
            "weights": self.weights.name,
        }
