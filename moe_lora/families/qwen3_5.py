# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and 3.6, dense: as Qwen3.5-MoE, with a dense MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import DELTA, DELTA_TENSORS, delta_layers
from .schema.config_json import ConfigJson
from .schema.family import ATTENTION, DENSE_MLP, QK_NORMS, TENSORS, Family


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    bias = config.flag("attention_bias")
    return {"qk_norm": True, "norm_offset": True, "attention_bias": bias, "unused": ("mtp.",)}


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return delta_layers(config, num_layers, is_interleaved=False)


FAMILY = Family(
    title="Qwen3.5",
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    tool_format="qwen3_coder",
    supported={"attn_output_gate": (True,)},
    layers=_layers,
    beside_experts=_beside,
    rotary_factor=0.25,
    tensors={**TENSORS, **QK_NORMS},
    recurrent_tensors=DELTA_TENSORS,
    attention=(*ATTENTION, *DELTA),
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
