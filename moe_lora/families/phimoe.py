# SPDX-License-Identifier: Apache-2.0
"""Phi-3.5-MoE: layer norm with biases, a sparsemixer gate, LongRoPE.

transformers 5 fused the experts, and renamed modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    EXPERT_SIZES,
    SIZES,
    TENSORS,
    Family,
    Place,
    fused_experts,
    linear_mlp,
    one_window,
    rope_types,
)

NORMS = {name.replace("weight", "bias"): key.replace("weight", "bias") for name, key in TENSORS.items()}
GATE = Place(path="mlp.router", site="router", is_split=False)
FUSED = fused_experts("mlp.experts", is_split=False)
OLDER = tuple(
    replace(place, is_split=True)
    for place in (
        Place(path="block_sparse_moe.gate", site="router"),
        *linear_mlp("block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
    )
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "norm": "layer",
        "norm_bias": True,
        "attention_bias": config.flag("attention_bias"),
        "gate": "sparsemixer",
        "gate_jitter": config.number("router_jitter_noise", default=0.01),
        "head_bias": config.flag("lm_head_bias"),
    }


FAMILY = Family(
    title="Phi-MoE",
    sizes={**SIZES, **EXPERT_SIZES},
    defaults={"num_key_value_heads": 8},
    supported={
        "num_experts_per_tok": (2,),
        **rope_types("default", "longrope"),
        "tie_word_embeddings": (False,),
    },
    layers=_layers,
    windows=one_window,
    theta=1e6,
    norm_eps=1e-5,
    tensors={**TENSORS, **NORMS},
    mlp=((GATE, *FUSED), OLDER),
    adapted=(GATE, *FUSED, *OLDER),
)
