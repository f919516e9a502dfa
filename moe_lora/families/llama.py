# SPDX-License-Identifier: Apache-2.0
"""Llama: dense layers, with the rotary scalings of Llama 3.1 and YaRN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, Family


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {"attention_bias": config.flag("attention_bias"), "mlp_bias": config.flag("mlp_bias")}


FAMILY = Family(title="Llama", tool_format="llama3_json", layers=_layers, mlp=(DENSE_MLP,), adapted=DENSE_MLP)
