# SPDX-License-Identifier: Apache-2.0
"""Qwen3: dense layers, RMS norm on each head of q and k, a window from layer max_window_layers on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import QK_NORMS, TENSORS, Family, late_windows, linear_mlp


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {"qk_norm": True, "attention_bias": config.flag("attention_bias")}


MLP = linear_mlp("mlp")
FAMILY = Family(
    title="Qwen3",
    layers=_layers,
    windows=late_windows,
    tensors={**TENSORS, **QK_NORMS},
    mlp=(MLP,),
    adapted=MLP,
)
