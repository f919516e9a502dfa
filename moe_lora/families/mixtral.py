# SPDX-License-Identifier: Apache-2.0
"""Mixtral: 8 large experts a layer.  transformers 5 fused the experts."""

from __future__ import annotations

from .schema.family import EXPERT_SIZES, SIZES, Family, Place, fused_experts, linear_mlp, one_window

LEAVES = ("w1", "w3", "w2")
GATE = Place(path="mlp.gate", site="router", optional_linear=True)
OLDER_GATE = Place(path="block_sparse_moe.gate", site="router")
FUSED = fused_experts("mlp.experts")


FAMILY = Family(
    title="Mixtral",
    tool_format="mistral",
    sizes={**SIZES, **EXPERT_SIZES},
    defaults={"num_key_value_heads": 8},
    supported={"attention_bias": (False,)},
    windows=one_window,
    theta=1e6,
    norm_eps=1e-5,
    mlp=((GATE, *FUSED), (OLDER_GATE, *linear_mlp("block_sparse_moe.experts.{}", LEAVES))),
    adapted=(GATE, *FUSED, *linear_mlp("mlp.experts.{}", LEAVES)),
    older_path=("mlp.", "block_sparse_moe."),
)
