# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5-MoE: rotation of neighbours, leading dense layers, corrected gates, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    SIZES,
    TENSORS,
    Family,
    linear_mlp,
    shared_and_dense,
)

CORRECTION = "moe_statics.e_score_correction_bias"


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "rotates_neighbours": True,
        "gate_correction": True,
        "gate_in_fp32": True,
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "unused": ("model.mtp_",),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    first = config.size("moe_layer_start_index", default=1, least=0)
    last = config.size("moe_layer_end_index", default=-1, least=-1)
    last, step = num_layers - 1 if last == -1 else last, config.size("moe_layer_interval", default=1)
    num_shared = config.size("moe_num_shared_experts", default=2, least=0)
    dense = (layer for layer in range(num_layers) if not first <= layer <= last or (layer + 1) % step)
    return shared_and_dense(config, num_shared, dense)


FAMILY = Family(
    title="ERNIE-4.5-MoE",
    sizes={
        **SIZES,
        "intermediate_size": ("moe_intermediate_size",),
        "num_experts": ("moe_num_experts",),
        "num_experts_per_token": ("moe_k",),
    },
    defaults={"num_key_value_heads": 4},
    supported={"use_bias": (False,), "moe_norm_min": (1e-12,)},
    layers=_layers,
    beside_experts=_beside,
    theta=500000.0,
    norm_eps=1e-5,
    tensors={**TENSORS, "mlp.correction.weight": f"mlp.gate.{CORRECTION}"},
    older_tensors={"mlp.correction.weight": f"mlp.{CORRECTION}"},
    beside=(*linear_mlp("mlp.shared_experts", kind="shared_"), *linear_mlp("mlp", kind="dense_")),
)
