# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 to 4.7: leading dense layers, a shared expert, corrected sigmoid gates, partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    QK_NORMS,
    SIZES,
    TENSORS,
    Family,
    linear_mlp,
)
from .schema.routed import CORRECTION, ROUTED_SIZES, corrected_gate, later_layers, leading_dense


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "qk_norm": config.flag("use_qk_norm"),
        "qkv_bias": config.flag("attention_bias"),
        **corrected_gate(config, 1.0),
        "unused": later_layers(config, "num_nextn_predict_layers", "num_mtp_layers", num_layers=1),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return leading_dense(config, num_layers, num_dense=1, num_shared=1)


FAMILY = Family(
    title="GLM-4.5 to 4.7",
    tool_format="glm4",
    sizes={**SIZES, **ROUTED_SIZES},
    defaults={"num_key_value_heads": 8},
    multimodal={"attention_bias": True},
    layers=_layers,
    beside_experts=_beside,
    rotary_factor=0.5,
    norm_eps=1e-5,
    tensors={**TENSORS, **QK_NORMS, **CORRECTION},
    beside=(*linear_mlp("mlp.shared_experts", kind="shared_"), *linear_mlp("mlp", kind="dense_")),
)
