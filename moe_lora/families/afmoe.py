# SPDX-License-Identifier: Apache-2.0
"""AFMoE (Arcee Trinity): gated attention, norms before and after, layers with a window or without rotation.

The attention's gate and the MLP's gate are both gate_proj.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    ATTENTION,
    EXPERT_SIZES,
    OUTPUT_GATE,
    QK_NORMS,
    SIZES,
    TENSORS,
    Family,
    Place,
    fused_experts,
    linear_mlp,
    shared_and_dense,
    windows_by_step,
)

GATE = Place(path="mlp.router.gate", site="router")
FUSED, LINEAR = fused_experts("mlp.experts"), linear_mlp("mlp.experts.{}")
ONE = (0, 1)


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    step = config.size("global_attn_every_n_layers", default=4)
    return windows_by_step(config, config.size("sliding_window", default=1024), step, num_layers)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    windows = _windows(config, config.size("num_hidden_layers"))
    hidden_size = config.size("hidden_size")
    return {
        "unrotated": tuple(layer for layer, window in enumerate(windows) if not window),
        "output_norms": True,
        "qk_norm": True,
        "attention_bias": config.flag("attention_bias"),
        "gate": "sigmoid_topk",
        "gate_correction": True,
        "routed_scale": config.number("route_scale", default=1.0),
        "embedding_multiplier": hidden_size**0.5 if config.flag("mup_enabled") else 1.0,
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    num_dense = min(config.size("num_dense_layers", default=1, least=0), num_layers)
    num_shared = config.size("num_shared_experts", default=2, least=0)
    return {"has_output_gate": True, **shared_and_dense(config, num_shared, range(num_dense))}


FAMILY = Family(
    title="AFMoE (Trinity)",
    tool_format="hermes",
    sizes={**SIZES, **EXPERT_SIZES, "intermediate_size": ("moe_intermediate_size",)},
    defaults={"head_dim": 128},
    supported={
        "score_func": ("sigmoid",),
        "route_norm": (True,),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), ONE),
    },
    layers=_layers,
    windows=_windows,
    beside_experts=_beside,
    norm_eps=1e-5,
    tensors={
        **TENSORS,
        **QK_NORMS,
        "add_attention.norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.weight": "pre_mlp_layernorm.weight",
        "add_mlp.norm.weight": "post_mlp_layernorm.weight",
        "mlp.correction.weight": "mlp.expert_bias",
    },
    attention=(*ATTENTION, OUTPUT_GATE),
    beside=(*linear_mlp("mlp.shared_experts", kind="shared_"), *linear_mlp("mlp", kind="dense_")),
    mlp=((GATE, *FUSED), (GATE, *LINEAR)),
    adapted=(GATE, *FUSED, *LINEAR),
)
