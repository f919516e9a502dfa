# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3, R1 and Kimi-K2: latent attention, dense layers at the start, corrected sigmoid gates."""

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
from .schema.routed import CORRECTION, corrected_gate, later_layers, leading_dense


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        **latent_scale(config),
        "attention_bias": config.flag("attention_bias"),
        "rotates_neighbours": config.flag("rope_interleave", True),
        **corrected_gate(config, 2.5, 8, 4),
        "unused": later_layers(config, "num_nextn_predict_layers", "num_mtp_layers", num_layers=1),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return {
        **latent_shape(config, q_rank=1536),
        **leading_dense(config, num_layers, num_dense=3, num_shared=1),
    }


FAMILY = Family(
    title="DeepSeek-V3, Kimi-K2",
    sizes=LATENT_SIZES,
    supported={
        **NO_SPARSE_ATTENTION,
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    layers=_layers,
    beside_experts=_beside,
    tensors={**LATENT_TENSORS, **CORRECTION},
    attention=LATENT_ATTENTION,
    beside=LATENT_BESIDE,
)
