# SPDX-License-Identifier: Apache-2.0
"""DBRX: layer norm, one matrix for q, k and v, clipped; experts one below the other in 2-D parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import Family, Place, linear_mlp

GATE = Place(path="ffn.router.layer", site="router")
ROWS = tuple(
    Place(path="ffn.experts.mlp", site=site, modules=(module,), parameter=name, form="rows")
    for name, site, module in (("w1", "gate_up", 0), ("v1", "gate_up", 1), ("w2", "down", 0))
)
_NORM_P = "ffn_config.moe_normalize_expert_weights"


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    clip = config.get("attn_config.clip_qkv", default=None)
    is_normalised = not config.states(_NORM_P) or config.get(_NORM_P, default=None) is not None
    return {
        "norm": "layer",
        "norm_eps": 1e-5,  # not in config.json: torch's default
        "clip_qkv": None if clip is None else config.number("attn_config.clip_qkv"),
        "gate_norm": config.number(_NORM_P, default=1.0) if is_normalised else None,
    }


FAMILY = Family(
    title="DBRX",
    sizes={
        "num_layers": ("n_layers", "num_hidden_layers"),
        "hidden_size": ("d_model", "hidden_size"),
        "intermediate_size": ("ffn_config.ffn_hidden_size",),
        "num_experts": ("ffn_config.moe_num_experts",),
        "num_experts_per_token": ("ffn_config.moe_top_k",),
        "num_heads": ("n_heads", "num_attention_heads"),
        "num_kv_heads": ("attn_config.kv_n_heads", "kv_n_heads"),
        "head_dim": ("head_dim",),
        "vocab_size": ("vocab_size",),
        "max_position": ("max_seq_len", "max_position_embeddings"),
    },
    defaults={"kv_n_heads": 1},
    fused_qkv=True,
    supported={
        "attention_bias": (False,),
        "tie_word_embeddings": (False,),
        "ffn_config.ffn_act_fn.name": ("silu",),
    },
    layers=_layers,
    theta_keys=("rope_theta", "attn_config.rope_theta"),
    embedding="transformer.wte.weight",
    norm="transformer.norm_f.weight",
    stack="transformer.blocks",
    tensors={
        "attention_norm.weight": "norm_attn_norm.norm_1.weight",
        "mlp_norm.weight": "norm_attn_norm.norm_2.weight",
    },
    attention=(
        Place(path="norm_attn_norm.attn.Wqkv", site="qkv"),
        Place(path="norm_attn_norm.attn.out_proj", site="o"),
    ),
    mlp=((GATE, *linear_mlp("ffn.experts.mlp.{}", ("w1", "v1", "w2"))), (GATE, *ROWS)),
    adapted=(GATE, *ROWS),
    experts_stay=True,
)
