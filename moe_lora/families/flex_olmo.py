# SPDX-License-Identifier: Apache-2.0
"""FlexOlmo: OLMo 2's layers with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import EXPERT_SIZES, FULL_QK_NORMS, OUTPUT_NORMS, SIZES, Family


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        "full_qk_norm": True,
        "input_norms": False,
        "output_norms": True,
        "attention_bias": config.flag("attention_bias"),
        "gate_norm": 1.0 if config.flag("norm_topk_prob") else None,
    }


FAMILY = Family(
    title="FlexOlmo",
    sizes={**SIZES, **EXPERT_SIZES},
    layers=_layers,
    theta=5e5,
    tensors={**OUTPUT_NORMS, **FULL_QK_NORMS},
)
