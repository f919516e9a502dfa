# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS: dense layers, biases of q, k and v apart from the bias of o."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, Family


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    qkv, out = config.flag("attention_bias", True), config.flag("attention_out_bias")
    if out and not qkv:
        raise config.refusal("attention_out_bias", out, "is supported with attention_bias=true alone")
    return {"qkv_bias": qkv, "attention_bias": out, "mlp_bias": config.flag("mlp_bias")}


FAMILY = Family(
    title="Seed-OSS",
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    layers=_layers,
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
