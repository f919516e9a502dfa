# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2: latent attention, dense layers at the start, shared experts, softmax gates over groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import (
    LATENT_ATTENTION,
    LATENT_BESIDE,
    LATENT_SIZES,
    LATENT_TENSORS,
    NO_SPARSE_ATTENTION,
    latent_scale,
    latent_shape,
)
from .schema.config_json import ConfigJson
from .schema.family import Family
from .schema.routed import gate_groups, leading_dense


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    in_groups = config.get("topk_method", default="greedy") == "group_limited_greedy"
    groups = gate_groups(config, "n_routed_experts", "num_experts_per_tok") if in_groups else {}
    return {
        **latent_scale(config),
        "attention_bias": config.flag("attention_bias"),
        "rotates_neighbours": True,
        "gate_norm": None,
        "gate_in_fp32": True,
        "group_scores": 1,
        **groups,
        "routed_scale": config.number("routed_scaling_factor", default=1.0),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return {
        **latent_shape(config, q_rank=1536),
        **leading_dense(config, num_layers, num_dense=0, num_shared=2),
    }


FAMILY = Family(
    title="DeepSeek-V2",
    sizes=LATENT_SIZES,
    supported={
        **NO_SPARSE_ATTENTION,
        "topk_method": ("greedy", "group_limited_greedy"),
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),  # implementations differ for true
        "scoring_func": ("softmax",),
    },
    layers=_layers,
    beside_experts=_beside,
    tensors=LATENT_TENSORS,
    attention=LATENT_ATTENTION,
    beside=LATENT_BESIDE,
)
