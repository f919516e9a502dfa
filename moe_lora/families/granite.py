# SPDX-License-Identifier: Apache-2.0
"""Granite: dense layers with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, Family
from .schema.granite import multipliers


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    biases = {"attention_bias": config.flag("attention_bias"), "mlp_bias": config.flag("mlp_bias")}
    return {**biases, **multipliers(config)}


FAMILY = Family(title="Granite", tool_format="granite", layers=_layers, mlp=(DENSE_MLP,), adapted=DENSE_MLP)
