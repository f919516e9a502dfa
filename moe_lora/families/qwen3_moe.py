# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: many small experts, RMS norm on each head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    EXPERT_SIZES,
    QK_NORMS,
    SIZES,
    TENSORS,
    Family,
    stated_window,
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "qk_norm": True,
        "attention_bias": config.flag("attention_bias"),
        "gate_norm": 1.0 if config.flag("norm_topk_prob") else None,
    }


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    return (stated_window(config) if config.flag("use_sliding_window") else 0,) * num_layers


FAMILY = Family(
    title="Qwen3-MoE",
    tool_format="hermes",
    # intermediate_size itself is of dense layers, which are not supported.
    sizes={**SIZES, **EXPERT_SIZES, "intermediate_size": ("moe_intermediate_size",)},
    defaults={"num_key_value_heads": 4},
    multimodal={"norm_topk_prob": True, "rope_theta": 1e6},
    supported={"mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
    layers=_layers,
    windows=_windows,
    tensors={**TENSORS, **QK_NORMS},
)
