# SPDX-License-Identifier: Apache-2.0
"""OLMo 3: OLMo 2's layers, windows in three of four layers; the others have the scaled rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import rope_by_window
from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, FULL_QK_NORMS, OUTPUT_NORMS, Family, windows_by_step


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    return windows_by_step(config, config.size("sliding_window", default=4096), 4, num_layers)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        **rope_by_window(config, theta=5e5),
        "full_qk_norm": True,
        "input_norms": False,
        "output_norms": True,
        "attention_bias": config.flag("attention_bias"),
    }


FAMILY = Family(
    title="OLMo 3",
    layers=_layers,
    windows=_windows,
    norm_eps=1e-5,
    tensors={**OUTPUT_NORMS, **FULL_QK_NORMS},
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
