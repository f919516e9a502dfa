# SPDX-License-Identifier: Apache-2.0
"""Granite-MoE: top k, then softmax; Granite's multipliers."""

from __future__ import annotations

from .schema.family import EXPERT_SIZES, SIZES, Family
from .schema.granite import ADAPTED, MLP, moe_layers

FAMILY = Family(
    title="Granite-MoE",
    tool_format="granite",
    sizes={**SIZES, **EXPERT_SIZES},
    layers=moe_layers,
    mlp=MLP,
    adapted=ADAPTED,
    experts_stay=True,
)
