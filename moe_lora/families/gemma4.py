# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 MoE: a dense MLP beside routed experts, heads of two sizes, K as V in layers of full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import GLOBAL_ATTENTION, global_heads, rope_of_heads, windows_before_full
from .schema.config_json import ConfigJson
from .schema.family import QK_NORMS, SIZES, Family, Place, fused_experts, linear_mlp

GATE = Place(path="router.proj", site="router")
FUSED, LINEAR = fused_experts("experts"), linear_mlp("experts.{}")


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    return windows_before_full(config, num_layers, step=6, window=512)


def _heads(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    return {"global_heads": global_heads(config, _windows(config, num_layers), head_dim=512)}


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    cap = config.number("final_logit_softcapping", default=0.0)
    return {
        "rope": rope_of_heads(
            config, _heads(config, config.size("num_hidden_layers"))["global_heads"].head_dim
        ),
        "qk_norm": True,
        "output_norms": True,
        "dense_beside": True,
        "activation": "gelu_tanh",
        "embedding_multiplier": config.size("hidden_size") ** 0.5,
        "rounds_multiplier": True,
        "logits_cap": cap or None,
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    config.require({"rope_scaling": ()})  # transformers lays it over rope_parameters
    if not config.flag("enable_moe_block"):
        raise config.refusal("enable_moe_block", False, "is not supported; supported is True (Gemma 4 MoE)")
    if size := config.size("hidden_size_per_layer_input", default=256, least=0):
        raise config.refusal(
            "hidden_size_per_layer_input", size, "is not supported (embeddings per layer); supported is 0"
        )
    return {"shared_size": config.size("intermediate_size"), **_heads(config, num_layers)}


FAMILY = Family(
    tool_format="gemma4",
    title="Gemma 4 MoE",
    sizes={
        **SIZES,
        "num_experts": ("num_experts",),
        "num_experts_per_token": ("top_k_experts",),
        "intermediate_size": ("moe_intermediate_size",),
    },
    supported={
        "attention_bias": (False,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "num_kv_shared_layers": (0,),
        "use_bidirectional_attention": ("vision",),
    },
    layers=_layers,
    windows=_windows,
    beside_experts=_beside,
    tensors={
        **QK_NORMS,
        "attention_norm.weight": "input_layernorm.weight",
        "add_attention.norm.weight": "post_attention_layernorm.weight",
        "mlp.shared_norm.weight": "pre_feedforward_layernorm.weight",
        "mlp.add_shared.weight": "post_feedforward_layernorm_1.weight",
        "mlp.routed_norm.weight": "pre_feedforward_layernorm_2.weight",
        "mlp.add_routed.weight": "post_feedforward_layernorm_2.weight",
        "mlp.seen_norm.weight": "router.scale",
        "mlp.expert_scale": "router.per_expert_scale",
        "add_mlp.norm.weight": "post_feedforward_layernorm.weight",
        "add_mlp.scale": "layer_scalar",
    },
    attention=GLOBAL_ATTENTION,
    beside=linear_mlp("mlp", kind="shared_"),
    mlp=((GATE, *FUSED), (GATE, *LINEAR)),
    adapted=(GATE, *FUSED, *LINEAR),
)
