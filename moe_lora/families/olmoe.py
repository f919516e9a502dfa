# SPDX-License-Identifier: Apache-2.0
"""OLMoE: many small experts, RMS norms over all heads of q and of k, then clipping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import (
    EXPERT_SIZES,
    FULL_QK_NORMS,
    SIZES,
    TENSORS,
    Family,
)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    clip = config.get("clip_qkv", default=None)
    return {
        "full_qk_norm": True,
        "attention_bias": config.flag("attention_bias"),
        "clip_qkv": None if clip is None else config.number("clip_qkv"),
        "gate_norm": 1.0 if config.flag("norm_topk_prob") else None,
    }


FAMILY = Family(
    title="OLMoE",
    sizes={**SIZES, **EXPERT_SIZES},
    layers=_layers,
    norm_eps=1e-5,
    tensors={**TENSORS, **FULL_QK_NORMS},
)
