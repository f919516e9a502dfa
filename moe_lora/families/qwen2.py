# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: dense layers, biases of q, k and v, a window from layer max_window_layers on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, Family, late_windows


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {"qkv_bias": True}


FAMILY = Family(
    title="Qwen2",
    tool_format="hermes",
    defaults={"num_key_value_heads": 32},
    multimodal={"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    layers=_layers,
    windows=late_windows,
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
