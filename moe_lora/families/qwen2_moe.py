# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE: a shared expert behind a sigmoid gate, dense layers by number or step, biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    EXPERT_SIZES,
    SHARED_EXPERT,
    SIZES,
    Family,
    linear_mlp,
    stated_window,
    stepped_experts,
    windows_by_type,
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "qkv_bias": config.flag("qkv_bias", True),
        "gate_norm": 1.0 if config.flag("norm_topk_prob") else None,
    }


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    if not config.flag("use_sliding_window"):
        return (0,) * num_layers
    first = config.size("max_window_layers", default=28, least=0)
    kinds = [
        "full_attention" if layer % 2 or layer >= first else "sliding_attention"
        for layer in range(num_layers)
    ]
    return windows_by_type(config, stated_window(config), kinds)


FAMILY = Family(
    title="Qwen2-MoE",
    tool_format="hermes",
    sizes={**SIZES, **EXPERT_SIZES, "intermediate_size": ("moe_intermediate_size",)},
    defaults={"num_key_value_heads": 16},
    layers=_layers,
    windows=_windows,
    beside_experts=lambda config, num_layers: stepped_experts(config, num_layers, shared_size=5632),
    beside=(*SHARED_EXPERT, *linear_mlp("mlp", kind="dense_")),
)
