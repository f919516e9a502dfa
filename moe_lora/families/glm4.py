# SPDX-License-Identifier: Apache-2.0
"""GLM-4, dense: norms before and after attention and MLP, half of each head rotated as neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import Family, Place

MLP = (Place(path="mlp.gate_up_proj", site="gate_up"), Place(path="mlp.down_proj", site="down"))


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "rotates_neighbours": True,
        "output_norms": True,
        "qkv_bias": config.flag("attention_bias", True),
    }


FAMILY = Family(
    title="GLM-4",
    defaults={"num_key_value_heads": 2, "head_dim": 128},
    fused_gate_up=True,
    layers=_layers,
    rotary_factor=0.5,
    norm_eps=1.5625e-7,
    tensors={
        "attention_norm.weight": "input_layernorm.weight",
        "add_attention.norm.weight": "post_self_attn_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "add_mlp.norm.weight": "post_mlp_layernorm.weight",
    },
    mlp=(MLP,),
    adapted=MLP,
)
