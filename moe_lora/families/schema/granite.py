# SPDX-License-Identifier: Apache-2.0
"""Granite's multipliers, and the gate and experts of its MoE models.

transformers 5 renamed modules, and kept the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config_json import ConfigJson
from .family import Place, fused_experts, linear_mlp

GATE = Place(path="block_sparse_moe.router", site="router", optional_linear=True, is_split=False)
FUSED = fused_experts("block_sparse_moe.experts", is_split=False)
OLDER_GATE = Place(path="block_sparse_moe.router.layer", site="router", is_split=True)
OLDER = tuple(
    replace(place, path=f"block_sparse_moe.{name}_linear", parameter="weight", is_split=True)
    for place, name in zip(FUSED, ("input", "output"), strict=True)
)
MLP = ((GATE, *FUSED), (OLDER_GATE, *OLDER), (GATE, *linear_mlp("block_sparse_moe.experts.{}")))
ADAPTED = (GATE, *FUSED, OLDER_GATE, *OLDER)


def multipliers(config: ConfigJson) -> Mapping[str, float]:
    """Granite's multipliers; 1 without the key."""
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    return {
        **{name: config.number(name, default=1.0) for name in names},
        "logits_divisor": config.number("logits_scaling", default=1.0),
    }


def moe_layers(config: ConfigJson) -> Mapping[str, Any]:
    """Fields of `ModelSpec`: top k, then softmax."""
    biases = {"attention_bias": config.flag("attention_bias")}
    return {**biases, "gate": "topk_softmax", **multipliers(config)}
