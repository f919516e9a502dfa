# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL-MoE's language model: Qwen3-MoE's layers; released experts are transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import EXPERT_SIZES, QK_NORMS, SIZES, TENSORS, Family, Place, fused_experts, linear_mlp

GATE = Place(path="mlp.gate", site="router", optional_linear=True)
LINEAR = linear_mlp("mlp.experts.{}")


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {"qk_norm": True, "attention_bias": config.flag("attention_bias")}


FAMILY = Family(
    title="Qwen3-VL-MoE",
    tool_format="hermes",
    sizes={**SIZES, **EXPERT_SIZES, "intermediate_size": ("moe_intermediate_size",)},
    defaults={"num_key_value_heads": 16},
    supported={"mlp_only_layers": ([],), "decoder_sparse_step": (1,), "norm_topk_prob": (True,)},
    layers=_layers,
    theta=5e5,
    tensors={**TENSORS, **QK_NORMS},
    mlp=((GATE, *fused_experts("mlp.experts", transposed=None)), (GATE, *LINEAR)),
    adapted=(GATE, *fused_experts("mlp.experts"), *LINEAR),
)
