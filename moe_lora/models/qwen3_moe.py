"""Qwen3-MoE: norms on each q and k head, SwiGLU experts, gate weights renormalised if the config says so."""

from __future__ import annotations

from typing import Any

from moe_lora.core.shape import ModelShape

from .loader import Checkpoint, WeightMap, attention_weights, expert_weights, stem_weights
from .spec import ModelSpec, require_plain, rope_spec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ConfigError for an option that is not supported."""
    require_plain(config)
    shape = ModelShape.from_hf_config(config)
    bias = bool(config.get("attention_bias"))
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return ModelSpec(
        shape=shape,
        rope=rope_spec(config, shape.head_dim, default_theta=1e4),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        window=(window or 0,) * shape.num_layers,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        gate_norm=1.0 if config.get("norm_topk_prob") else None,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
    )


def weight_map(spec: ModelSpec, checkpoint: Checkpoint) -> WeightMap:
    names = ("gate_proj", "up_proj", "down_proj")
    weights = stem_weights(spec)
    for layer in range(spec.shape.num_layers):
        weights |= attention_weights(spec, layer)
        weights |= expert_weights(spec.shape, layer, checkpoint, "mlp", names)
    return weights
