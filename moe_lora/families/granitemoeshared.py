# SPDX-License-Identifier: Apache-2.0
"""Granite-MoE with a shared expert beside the routed ones.

transformers 5 renamed modules, and kept the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import EXPERT_SIZES, SIZES, Family, Place, fused_experts, linear_mlp, multipliers

GATE = Place(path="block_sparse_moe.router", site="router", optional_linear=True, is_split=False)
FUSED = fused_experts("block_sparse_moe.experts", is_split=False)
OLDER_GATE = Place(path="block_sparse_moe.router.layer", site="router", is_split=True)
OLDER = tuple(
    replace(place, path=f"block_sparse_moe.{name}_linear", parameter="weight", is_split=True)
    for place, name in zip(FUSED, ("input", "output"), strict=True)
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    biases = {"attention_bias": config.flag("attention_bias")}
    return {**biases, "gate": "topk_softmax", **multipliers(config)}


FAMILY = Family(
    title="Granite-MoE, shared",
    tool_format="granite",
    sizes={**SIZES, **EXPERT_SIZES},
    layers=_layers,
    beside_experts=lambda config, num_layers: {
        "shared_size": config.size("shared_intermediate_size", default=0, least=0)
    },
    beside=(
        Place(path="shared_mlp.input_linear", site="shared_gate_up", modules=(0, 1)),
        Place(path="shared_mlp.output_linear", site="shared_down"),
    ),
    mlp=((GATE, *FUSED), (OLDER_GATE, *OLDER), (GATE, *linear_mlp("block_sparse_moe.experts.{}"))),
    adapted=(GATE, *FUSED, OLDER_GATE, *OLDER),
    experts_stay=True,
)
