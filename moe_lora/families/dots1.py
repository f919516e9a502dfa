# SPDX-License-Identifier: Apache-2.0
"""dots.llm1: leading dense layers, shared experts, corrected sigmoid gates, windows by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import QK_NORMS, SIZES, TENSORS, Family, linear_mlp, windows_after
from .schema.routed import CORRECTION, ROUTED_SIZES, corrected_gate, leading_dense


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    return windows_after(config, num_layers, 62)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "qk_norm": True,
        "attention_bias": config.flag("attention_bias"),
        **corrected_gate(config, 1.0),
        "gate_norm": 1.0 if config.flag("norm_topk_prob") else None,
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return leading_dense(config, num_layers, num_dense=0, num_shared=0)


FAMILY = Family(
    title="dots.llm1",
    defaults={"num_key_value_heads": 32},
    tool_format="hermes",
    sizes={**SIZES, **ROUTED_SIZES},
    layers=_layers,
    windows=_windows,
    beside_experts=_beside,
    tensors={**TENSORS, **QK_NORMS, **CORRECTION},
    beside=(*linear_mlp("mlp.shared_experts", kind="shared_"), *linear_mlp("mlp", kind="dense_")),
)
