"""Mixtral: top-k softmax gate with renormalised weights, SwiGLU experts."""

from __future__ import annotations

from typing import Any

from moe_lora.core.shape import ModelShape

from .loader import Checkpoint, WeightMap, attention_weights, expert_weights, stem_weights
from .spec import ModelSpec, require, require_plain, rope_spec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ConfigError for an option that is not supported."""
    require_plain(config)
    require(config, attention_bias=(False,))
    shape = ModelShape.from_hf_config(config)
    return ModelSpec(
        shape=shape,
        rope=rope_spec(config, shape.head_dim, default_theta=1e6),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        window=(config.get("sliding_window") or 0,) * shape.num_layers,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
    )


def weight_map(spec: ModelSpec, checkpoint: Checkpoint) -> WeightMap:
    """The experts' w1, w3 and w2 are gate, up and down."""
    weights = stem_weights(spec)
    for layer in range(spec.shape.num_layers):
        weights |= attention_weights(spec, layer)
        weights |= expert_weights(spec.shape, layer, checkpoint, "block_sparse_moe", ("w1", "w3", "w2"))
    return weights
