# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-MoE and 3.6: as Qwen3-Next, with a matrix for each projection.

A position of text is one number, so the interleaved rotation of images is the plain rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import DELTA, DELTA_TENSORS, delta_layers
from .schema.config_json import ConfigJson
from .schema.family import (
    ATTENTION,
    EXPERT_SIZES,
    QK_NORMS,
    SHARED_EXPERT,
    SIZES,
    TENSORS,
    Family,
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "qk_norm": True,
        "norm_offset": True,
        "attention_bias": config.flag("attention_bias"),
        "unused": ("mtp.",),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return {
        **delta_layers(config, num_layers, is_interleaved=False),
        "shared_size": config.size("shared_expert_intermediate_size", default=512),
        "has_shared_gate": True,
    }


FAMILY = Family(
    title="Qwen3.5-MoE",
    tool_format="qwen3_coder",
    sizes={**SIZES, **EXPERT_SIZES, "intermediate_size": ("moe_intermediate_size",)},
    defaults={"num_key_value_heads": 2, "head_dim": 256},
    supported={"norm_topk_prob": (True,), "attn_output_gate": (True,), "mlp_only_layers": ([],)},
    layers=_layers,
    beside_experts=_beside,
    rotary_factor=0.25,
    tensors={**TENSORS, **QK_NORMS},
    recurrent_tensors=DELTA_TENSORS,
    attention=(*ATTENTION, *DELTA),
    beside=SHARED_EXPERT,
)
