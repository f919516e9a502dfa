"""Mixtral: top-k softmax gate with renormalised weights, SwiGLU experts."""

from __future__ import annotations

from typing import Any

from moe_lora.core.shape import ModelShape

from .loader import Checkpoint, Piece, WeightMap
from .rope import rope_spec
from .spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    shape = ModelShape.from_hf_config(config)
    return ModelSpec(
        shape=shape,
        rope=rope_spec(config, shape.head_dim),
        norm_eps=config["rms_norm_eps"],
        window=(config.get("sliding_window") or 0,) * shape.num_layers,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
    )


def weight_map(spec: ModelSpec, checkpoint: Checkpoint) -> WeightMap:
    shape = spec.shape
    weights = stem_weights(spec)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= attention_weights(shape, layer)
        experts = f"{prefix}.block_sparse_moe.experts"
        inner = shape.intermediate_size
        weights[f"layers.{layer}.mlp.gate.weight"] = [Piece(f"{prefix}.block_sparse_moe.gate.weight")]
        weights[f"layers.{layer}.mlp.gate_up.weight"] = [
            piece
            for e in range(shape.num_experts)
            for piece in (
                Piece(f"{experts}.{e}.w1.weight", (e, slice(0, inner))),
                Piece(f"{experts}.{e}.w3.weight", (e, slice(inner, 2 * inner))),
            )
        ]
        weights[f"layers.{layer}.mlp.down.weight"] = [
            Piece(f"{experts}.{e}.w2.weight", (e,)) for e in range(shape.num_experts)
        ]
    return weights


def stem_weights(spec: ModelSpec) -> WeightMap:
    """Embedding, last norm and head, named alike in most families."""
    weights = {
        "embedding": [Piece("model.embed_tokens.weight")],
        "norm.weight": [Piece("model.norm.weight")],
    }
    if not spec.tie_word_embeddings:
        weights["head"] = [Piece("lm_head.weight")]
    return weights


def attention_weights(shape: ModelShape, layer: int, *, bias: bool = False) -> WeightMap:
    """Norms and q/k/v/o projections of one layer, named alike in most families."""
    prefix = f"model.layers.{layer}"
    site = shape.sites[0]
    weights: WeightMap = {
        f"layers.{layer}.attention_norm.weight": [Piece(f"{prefix}.input_layernorm.weight")],
        f"layers.{layer}.mlp_norm.weight": [Piece(f"{prefix}.post_attention_layernorm.weight")],
    }
    for kind in ("weight", "bias") if bias else ("weight",):
        weights[f"layers.{layer}.attention.o.{kind}"] = [Piece(f"{prefix}.self_attn.o_proj.{kind}")]
        weights[f"layers.{layer}.attention.qkv.{kind}"] = [
            Piece(f"{prefix}.self_attn.{name}_proj.{kind}", (slice(column, column + width),))
            for name, column, width in zip("qkv", site.columns, site.out_features, strict=True)
        ]
    return weights
