# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: norms before and after attention and MLP; layers with a window have their own rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import rope_by_window
from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, QK_NORMS, Family, windows_by_step


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    step = config.size("sliding_window_pattern", default=6)
    return windows_by_step(config, config.size("sliding_window", default=4096), step, num_layers)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    cap = config.number("final_logit_softcapping", default=0.0)
    return {
        **rope_by_window(config, theta=1e6, local=config.number("rope_local_base_freq", default=1e4)),
        "qk_norm": True,
        "norm_offset": True,
        "output_norms": True,
        "attention_bias": config.flag("attention_bias"),
        "attention_multiplier": config.number("query_pre_attn_scalar", default=256) ** -0.5,
        "activation": "gelu_tanh",
        "embedding_multiplier": config.size("hidden_size") ** 0.5,
        "rounds_multiplier": True,
        "logits_cap": cap or None,
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }


FAMILY = Family(
    title="Gemma 3",
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    supported={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (),
        "use_bidirectional_attention": (False,),
    },
    layers=_layers,
    windows=_windows,
    tensors={
        **QK_NORMS,
        "attention_norm.weight": "input_layernorm.weight",
        "add_attention.norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.weight": "pre_feedforward_layernorm.weight",
        "add_mlp.norm.weight": "post_feedforward_layernorm.weight",
    },
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
