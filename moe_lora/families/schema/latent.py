# SPDX-License-Identifier: Apache-2.0
"""Multi-head Latent Attention as data: keys of config.json, tensors, LoRA pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moe_lora.core.attention_shapes import MlaShape

from .config_json import ConfigJson
from .family import SIZES, TENSORS, Place, linear_mlp
from .routed import ROUTED_SIZES

LATENT_SIZES: Mapping[str, tuple[str, ...]] = {
    **{name: keys for name, keys in SIZES.items() if name not in ("num_kv_heads", "head_dim")},
    **ROUTED_SIZES,
}
"""Sizes beside those of `latent_shape`."""
LATENT_TENSORS: Mapping[str, str] = {
    **TENSORS,
    "attention.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm.weight",
}
LATENT_ATTENTION = (
    Place(path="self_attn.q_proj", site="q"),
    Place(path="self_attn.q_a_proj", site="q_a"),
    Place(path="self_attn.q_b_proj", site="q_b"),
    Place(path="self_attn.kv_a_proj_with_mqa", site="kv_a"),
    Place(path="self_attn.kv_b_proj", site="latent_k", form="heads"),
    Place(path="self_attn.o_proj", site="o"),
)
LATENT_BESIDE = (*linear_mlp("mlp.shared_experts", kind="shared_"), *linear_mlp("mlp", kind="dense_"))
NO_SPARSE_ATTENTION: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    ("index_topk", "index_n_heads", "index_head_dim"), ()
)
"""Keys of DeepSeek Sparse Attention, which is not supported."""
_LARGEST = 65_536


def latent_shape(config: ConfigJson, q_rank: int, nope_dim: int = 128, v_dim: int = 128) -> Mapping[str, Any]:
    """Fields of `ModelShape`.  q_rank, nope_dim, v_dim: of a config without the keys.

    A stated q_lora_rank of null means no latent of queries.  Raises ConfigError for grouped heads.
    """
    heads = config.size("num_attention_heads")
    if (groups := config.size("num_key_value_heads", default=heads)) != heads:
        raise config.refusal(
            "num_key_value_heads", groups, f"must be num_attention_heads={heads} in latent attention"
        )
    stated = config.states("q_lora_rank")
    sizes = MlaShape(
        q_rank=config.size("q_lora_rank", default=0 if stated else q_rank, least=0),
        kv_rank=config.size("kv_lora_rank", default=512),
        nope_dim=config.size("qk_nope_head_dim", default=nope_dim),
        rope_dim=config.size("qk_rope_head_dim", default=64, least=2),
        v_dim=config.size("v_head_dim", default=v_dim),
    )
    if sizes.cached_dim > _LARGEST:
        raise config.refusal("kv_lora_rank", sizes.kv_rank, f"and rotated dims must be at most {_LARGEST}")
    return {"mla": sizes, "num_kv_heads": 1, "head_dim": sizes.cached_dim}


def latent_scale(config: ConfigJson, nope_dim: int = 128) -> Mapping[str, Any]:
    """Fields of `ModelSpec`: the factor on q @ k, which a scaled rotation with mscale_all_dim enlarges."""
    size = config.size("qk_nope_head_dim", default=nope_dim) + config.size("qk_rope_head_dim", default=64)
    section = config.section("rope_parameters", "rope_scaling")
    scale = 1.0
    kind = section.get("rope_type", "type", default="default")
    if kind != "default" and (weight := section.number("mscale_all_dim", default=0.0, above=-1.0)):
        factor = section.number("factor")
        scale = 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    return {"attention_multiplier": size**-0.5 * scale * scale}
