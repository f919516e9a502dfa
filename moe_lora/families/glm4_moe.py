# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 to 4.7: leading dense layers, a shared expert, sigmoid gates with a correction, partial rotation.

The layer after the last is for multi-token prediction and is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    ADAPTED_EXPERTS,
    EXPERT_FORMS,
    QK_NORMS,
    SIZES,
    TENSORS,
    Family,
    dense_layers,
    gate_groups,
    linear_mlp,
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    num_layers, num_unused = config.size("num_hidden_layers"), config.size(*_UNUSED, default=1, least=0)
    return {
        "qk_norm": config.flag("use_qk_norm"),
        "qkv_bias": config.flag("attention_bias"),
        "gate": "sigmoid_topk",
        "gate_norm": 1.0 if config.flag("norm_topk_prob", True) else None,
        "gate_correction": True,
        "gate_in_fp32": True,
        **gate_groups(config, "n_routed_experts", "num_experts_per_tok"),
        "routed_scale": config.number("routed_scaling_factor", default=1.0),
        "unused": tuple(f"model.layers.{num_layers + i}." for i in range(num_unused)),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    num_dense = min(config.size("first_k_dense_replace", default=1, least=0), num_layers)
    num_shared = config.size("n_shared_experts", default=1, least=0)
    return {
        "shared_size": num_shared * config.size("moe_intermediate_size"),
        **dense_layers(config, range(num_dense), "intermediate_size"),
    }


_UNUSED = ("num_nextn_predict_layers", "num_mtp_layers")
FAMILY = Family(
    title="GLM-4.5 to 4.7",
    tool_format="glm4",
    sizes={
        **SIZES,
        "intermediate_size": ("moe_intermediate_size",),
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_experts_per_token": ("num_experts_per_tok",),
    },
    layers=_layers,
    beside_experts=_beside,
    rotary_factor=0.5,
    norm_eps=1e-5,
    tensors={**TENSORS, **QK_NORMS, "mlp.correction.weight": "mlp.gate.e_score_correction_bias"},
    beside=(*linear_mlp("mlp.shared_experts", kind="shared_"), *linear_mlp("mlp", kind="dense_")),
    mlp=EXPERT_FORMS,
    adapted=ADAPTED_EXPERTS,
)
