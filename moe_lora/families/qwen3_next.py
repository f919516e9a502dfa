# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: Gated DeltaNet in most layers, else gated attention; a shared expert behind a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import DELTA_TENSORS, INTERLEAVED_DELTA, delta_layers
from .schema.config_json import ConfigJson
from .schema.family import (
    ATTENTION,
    EXPERT_SIZES,
    QK_NORMS,
    SHARED_EXPERT,
    SIZES,
    TENSORS,
    Family,
    linear_mlp,
    stepped_experts,
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "qk_norm": True,
        "norm_offset": True,
        "attention_bias": config.flag("attention_bias"),
        "gate_norm": 1.0 if config.flag("norm_topk_prob", True) else None,
        "unused": ("mtp.",),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return {
        **delta_layers(config, num_layers, is_interleaved=True),
        **stepped_experts(config, num_layers, shared_size=512),
    }


FAMILY = Family(
    title="Qwen3-Next",
    tool_format="hermes",
    sizes={**SIZES, **EXPERT_SIZES, "intermediate_size": ("moe_intermediate_size",)},
    defaults={"num_key_value_heads": 2, "head_dim": 256},
    layers=_layers,
    beside_experts=_beside,
    rotary_factor=0.25,
    tensors={**TENSORS, **QK_NORMS},
    recurrent_tensors=DELTA_TENSORS,
    attention=(*ATTENTION, *INTERLEAVED_DELTA),
    beside=(*SHARED_EXPERT, *linear_mlp("mlp", kind="dense_")),
)
