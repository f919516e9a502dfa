# SPDX-License-Identifier: Apache-2.0
"""Granite-MoE with a shared expert beside the routed ones."""

from __future__ import annotations

from .schema.family import EXPERT_SIZES, SIZES, Family, Place
from .schema.granite import ADAPTED, MLP, moe_layers

FAMILY = Family(
    title="Granite-MoE, shared",
    tool_format="granite",
    sizes={**SIZES, **EXPERT_SIZES},
    layers=moe_layers,
    beside_experts=lambda config, num_layers: {
        "shared_size": config.size("shared_intermediate_size", default=0, least=0)
    },
    beside=(
        Place(path="shared_mlp.input_linear", site="shared_gate_up", modules=(0, 1)),
        Place(path="shared_mlp.output_linear", site="shared_down"),
    ),
    mlp=MLP,
    adapted=ADAPTED,
    experts_stay=True,
)
