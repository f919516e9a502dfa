# SPDX-License-Identifier: Apache-2.0
"""Qwen3: dense layers, RMS norm on each head of q and k, a window from layer max_window_layers on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, QK_NORMS, TENSORS, Family, late_windows


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {"qk_norm": True, "attention_bias": config.flag("attention_bias")}


FAMILY = Family(
    title="Qwen3",
    tool_format="hermes",
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    multimodal={"rope_theta": 5e5},
    layers=_layers,
    windows=late_windows,
    tensors={**TENSORS, **QK_NORMS},
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
