# SPDX-License-Identifier: Apache-2.0
"""Mistral: dense layers, one window for all layers (4096 tokens by default)."""

from __future__ import annotations

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, Family, stated_window


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    kinds = config.get("layer_types", default=[])
    if not isinstance(kinds, list) or len({str(kind) for kind in kinds}) > 1:
        raise config.refusal("layer_types", kinds, "is not supported; all layers have one kind of attention")
    return (stated_window(config),) * num_layers


FAMILY = Family(
    title="Mistral",
    tool_format="mistral",
    defaults={"num_key_value_heads": 8},
    windows=_windows,
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
