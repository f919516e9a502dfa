# SPDX-License-Identifier: Apache-2.0
"""Inputs of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lora.config.plan import PlanGoals
from moe_lora.config.settings import settings_of
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.core.weight_format import UNQUANTISED, WeightFormat
from moe_lora.provision.device_profile import Profile

from .memory import AdapterMix
from .prompts import PromptLoad

_FROM_TRACE = {
    "rate_per_s": "change --request-rate",
    "output_tokens": "it is the trace's mean",
    "context_tokens": "it is the trace's mean",
}


@dataclass(frozen=True, kw_only=True)
class PlanInputs(PlanGoals):
    """A model, its adapters, a load, a device and two SLOs.

    probabilities: [N], by adapter.  weights: format on an instance.  rate_per_s, output_tokens,
    context_tokens: means.  prompts: None: computed by another device (InfiniLoRA section 2.1).
    trace_rate_per_s: the trace's mean if rate_per_s is its mean or peak.  assumed: the user's rates for the
    profile.  adapters_are_traces: probabilities come from the trace.  Raises ConfigError for impossible
    numbers.
    """

    model: str
    shape: ModelShape
    mix: AdapterMix
    profile: Profile
    instance_gpus: int
    probabilities: NDArray[np.float64] = field(repr=False)
    output_tokens: float
    context_tokens: float
    weights: WeightFormat = UNQUANTISED
    rate_per_s: float | None = None
    prompts: PromptLoad | None = None
    assumed: Mapping[str, float] = field(default_factory=dict)
    popularity_source: str = ""
    trace_rate_per_s: float | None = None
    adapters_are_traces: bool = False
    adapter_share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("output_tokens", "context_tokens", "rate_per_s", "instance_gpus"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                where = _FROM_TRACE.get(name, f"change --{name.replace('_', '-')}")
                raise ConfigError(f"{name}={value} must be a finite number above 0; {where}")
        if not 0 < self.adapter_share <= 1:
            raise ConfigError(f"adapter_share={self.adapter_share} must be above 0 and at most 1")
        if self.rate_per_s is None and self.global_batch is None:
            raise ConfigError(
                "the load is unknown: the trace has no arrival times, or one only; "
                "give --request-rate or --global-batch"
            )

    @property
    def adapter_bytes(self) -> float:
        """Mean bytes of an adapter."""
        return self.mix.adapter_bytes(self.shape)

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
