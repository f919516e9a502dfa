# SPDX-License-Identifier: Apache-2.0
"""Qwen3: dense layers, RMS norm on each head of q and k, a window from layer max_window_layers on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import QK_NORMS, TENSORS, Family, linear_mlp, windows_by_type


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {"qk_norm": True, "attention_bias": config.flag("attention_bias")}


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    if not config.flag("use_sliding_window"):
        return (0,) * num_layers
    num_full = min(config.size("max_window_layers", default=28, least=0), num_layers)
    kinds = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    return windows_by_type(config, config.size("sliding_window"), kinds)


MLP = linear_mlp("mlp")
FAMILY = Family(
    title="Qwen3",
    layers=_layers,
    windows=_windows,
    tensors={**TENSORS, **QK_NORMS},
    mlp=(MLP,),
    adapted=MLP,
)
