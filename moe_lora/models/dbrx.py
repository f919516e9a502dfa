"""DBRX: layer norms, clipped q/k/v of one fused projection, experts stacked in 2-D tensors.

Legend: E experts, F expert inner size, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_lora.core.shape import ModelShape

from .loader import Checkpoint, Piece, WeightMap, stem_weights
from .spec import ModelSpec, require, require_plain, rope_spec

LAYER_NORM_EPS = 1e-5  # not in DBRX's config.json: torch's default


def spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ConfigError for an option that is not supported."""
    attention, ffn = config.get("attn_config") or {}, config.get("ffn_config") or {}
    require_plain(config)
    require(config, tie_word_embeddings=(False,))
    require(ffn.get("ffn_act_fn") or {}, "ffn_config.ffn_act_fn", name=("silu",))
    shape = ModelShape.from_hf_config(config)
    return ModelSpec(
        shape=shape,
        rope=rope_spec(config, shape.head_dim, default_theta=attention.get("rope_theta") or 1e4),
        norm_eps=LAYER_NORM_EPS,
        window=(0,) * shape.num_layers,
        norm="layer",
        clip_qkv=attention.get("clip_qkv"),
        gate_norm=ffn.get("moe_normalize_expert_weights", 1.0),
    )


def weight_map(spec: ModelSpec, checkpoint: Checkpoint) -> WeightMap:
    """w1, v1 and w2 are gate, up and (untransposed) down of all experts, one below the other."""
    experts, inner = spec.shape.num_experts, spec.shape.intermediate_size

    def per_expert(stacked: torch.Tensor) -> torch.Tensor:
        """[E*F, H] -> [E, F, H]; another number of rows stays as it is, for the loader to report."""
        return stacked.view(experts, inner, -1) if stacked.shape[0] == experts * inner else stacked

    def per_expert_down(stacked: torch.Tensor) -> torch.Tensor:
        return per_expert(stacked).mT

    weights = stem_weights(spec, embedding="transformer.wte.weight", norm="transformer.norm_f.weight")
    for layer in range(spec.shape.num_layers):
        block, target = f"transformer.blocks.{layer}", f"layers.{layer}"
        mlp = f"{block}.ffn.experts.mlp"
        weights |= {
            f"{target}.attention_norm.weight": [Piece(f"{block}.norm_attn_norm.norm_1.weight")],
            f"{target}.mlp_norm.weight": [Piece(f"{block}.norm_attn_norm.norm_2.weight")],
            f"{target}.attention.qkv.weight": [Piece(f"{block}.norm_attn_norm.attn.Wqkv.weight")],
            f"{target}.attention.o.weight": [Piece(f"{block}.norm_attn_norm.attn.out_proj.weight")],
            f"{target}.mlp.gate.weight": [Piece(f"{block}.ffn.router.layer.weight")],
            f"{target}.mlp.gate_up.weight": [
                Piece(f"{mlp}.w1", (slice(None), slice(0, inner)), per_expert),
                Piece(f"{mlp}.v1", (slice(None), slice(inner, 2 * inner)), per_expert),
            ],
            f"{target}.mlp.down.weight": [Piece(f"{mlp}.w2", (), per_expert_down)],
        }
    return weights
