# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5, dense: rotation of neighbours, biases by config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, Family


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "rotates_neighbours": True,
        **dict.fromkeys(("attention_bias", "mlp_bias"), config.flag("use_bias")),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }


FAMILY = Family(
    title="ERNIE-4.5",
    defaults={"num_key_value_heads": 2, "head_dim": 128},
    layers=_layers,
    theta=5e5,
    norm_eps=1e-5,
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
