# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: corrected sigmoid gates, RMS norms over all heads of q and of k, partial rotation.

Released files have Mixtral's names; transformers 5 renames modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    EXPERT_SIZES,
    FULL_QK_NORMS,
    SIZES,
    TENSORS,
    Family,
    Place,
    fused_experts,
    linear_mlp,
)
from .schema.routed import later_layers

LEAVES = ("w1", "w3", "w2")
GATE = Place(path="mlp.gate", site="router", optional_linear=True)
OLDER_GATE = Place(path="block_sparse_moe.gate", site="router")
FUSED = fused_experts("mlp.experts")
CORRECTION, NAME = "mlp.correction.weight", "e_score_correction_bias"
ONE = (1, 1.0)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    if set(kinds := config.numbers("attn_type_list")) - {1}:
        raise config.refusal("attn_type_list", kinds, "must be 1 in each layer: full attention")
    return {
        "full_qk_norm": True,
        "gate": "sigmoid_topk",
        "gate_correction": True,
        "unused": later_layers(config, "num_mtp_modules", "num_nextn_predict_layers", num_layers=0),
    }


FAMILY = Family(
    title="MiniMax-M2",
    tool_format="minimax_m2",
    sizes={**SIZES, **EXPERT_SIZES},
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    supported={
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "attention_bias": (False,),
        "shared_intermediate_size": (0,),
        "sliding_window": (),
        **dict.fromkeys(("num_expert_group", "n_group", "topk_group", "routed_scaling_factor"), ONE),
        **dict.fromkeys(("layernorm_full_attention_beta", "layernorm_mlp_beta"), ONE),
    },
    layers=_layers,
    theta=5e6,
    rotary_factor=lambda config, head_dim: config.size("rotary_dim", default=head_dim) / head_dim,
    tensors={**TENSORS, **FULL_QK_NORMS, CORRECTION: f"mlp.{NAME}"},
    older_tensors={CORRECTION: f"block_sparse_moe.{NAME}"},
    mlp=((GATE, *FUSED), (OLDER_GATE, *linear_mlp("block_sparse_moe.experts.{}", LEAVES))),
    adapted=(GATE, *FUSED, *linear_mlp("mlp.experts.{}", LEAVES)),
    older_path=("mlp.", "block_sparse_moe."),
)
