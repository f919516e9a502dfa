# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: dense layers, each fourth without rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, Family, windows_by_type


def _unrotated(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    step = config.size("no_rope_layer_interval", default=4)
    rotated = config.numbers("no_rope_layers") or [(layer + 1) % step for layer in range(num_layers)]
    if len(rotated) < num_layers:
        raise config.refusal("no_rope_layers", list(rotated), f"must have {num_layers} numbers or more")
    return tuple(layer for layer in range(num_layers) if not rotated[layer])


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    unrotated = _unrotated(config, num_layers) if config.flag("use_sliding_window") else ()
    kinds = ["sliding_attention" if i in unrotated else "full_attention" for i in range(num_layers)]
    return windows_by_type(config, config.size("sliding_window", default=0, least=0), kinds)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "unrotated": _unrotated(config, config.size("num_hidden_layers")),
        "attention_bias": config.flag("attention_bias"),
        "mlp_bias": config.flag("mlp_bias"),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }


FAMILY = Family(
    title="SmolLM3",
    defaults={"num_key_value_heads": 4},
    tool_format="hermes",
    layers=_layers,
    windows=_windows,
    theta=2e6,
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
