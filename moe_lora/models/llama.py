"""Llama: dense SwiGLU layers, biases if the config says so."""

from __future__ import annotations

from typing import Any

from moe_lora.core.shape import ModelShape

from .loader import Checkpoint, WeightMap, attention_weights, dense_mlp_weights, stem_weights
from .spec import ModelSpec, require_plain, rope_spec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ConfigError for an option that is not supported."""
    require_plain(config)
    shape = ModelShape.from_hf_config(config)
    attention_bias = bool(config.get("attention_bias"))
    return ModelSpec(
        shape=shape,
        rope=rope_spec(config, shape.head_dim, default_theta=1e4),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        window=(0,) * shape.num_layers,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")),
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
    )


def weight_map(spec: ModelSpec, checkpoint: Checkpoint) -> WeightMap:
    weights = stem_weights(spec)
    for layer in range(spec.shape.num_layers):
        weights |= attention_weights(spec, layer)
        weights |= dense_mlp_weights(spec, layer)
    return weights
