# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS: attention sinks, every other layer with a window, biases, experts in MXFP4.

Unsloth trains 4-bit models with a linear layer for each expert: gate_up_projs.{e} is [2F, H] with gate in
even and up in odd rows.  Source: unsloth_zoo, temporary_patches/gpt_oss.py (GptOssExperts, GptOssTopKRouter).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    EXPERT_SIZES,
    SIZES,
    TENSORS,
    Family,
    Place,
    fused_experts,
    linear_mlp,
    windows_by_type,
)

GATE = Place(path="mlp.router", site="router", optional_linear=True, is_split=False)
FUSED = fused_experts("mlp.experts", interleaved=True, transposed=True, is_split=False)
MXFP4 = tuple(replace(place, form="mxfp4", transposed=False) for place in FUSED)
UNSLOTH = (
    Place(path="mlp.router.linear", site="router", is_split=True),
    Place(
        path="mlp.experts.gate_up_projs.{}", site="gate_up", modules=(0, 1), interleaved=True, is_split=True
    ),
    Place(path="mlp.experts.down_projs.{}", site="down", is_split=True),
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "attention_bias": config.flag("attention_bias", True),
        "sinks": True,
        "gate": "topk_softmax",
        "gate_bias": True,
        "mlp_bias": True,
        "activation": "swigluoai",
        "activation_limit": config.number("swiglu_limit", default=7.0),
    }


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    kinds = (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
    return windows_by_type(config, config.size("sliding_window", default=128), kinds)


FAMILY = Family(
    title="GPT-OSS",
    tool_format="harmony",
    sizes={**SIZES, **EXPERT_SIZES},
    defaults={"num_key_value_heads": 8, "head_dim": 64},
    supported={"swiglu_alpha": (1.702,)},
    layers=_layers,
    windows=_windows,
    theta=150000.0,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    norm_eps=1e-5,
    tensors={**TENSORS, "attention.sinks": "self_attn.sinks"},
    mlp=((GATE, *linear_mlp("mlp.experts.{}")), (GATE, *MXFP4), (GATE, *FUSED)),
    adapted=(GATE, *FUSED, *UNSLOTH),
    own_format="mxfp4",
    experts_stay=True,
)
