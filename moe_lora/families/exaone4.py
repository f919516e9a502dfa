# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4.0: dense layers, norms after attention and MLP alone; full layers beside windows don't rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, OUTPUT_NORMS, QK_NORMS, Family, stated_window, windows_by_step


def _windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    if not (window := stated_window(config)):
        return (0,) * num_layers
    listed = config.get("layer_types", default=None) is not None
    step = 1 if listed else config.size("sliding_window_pattern", default=4)
    return windows_by_step(config, window, step, num_layers)


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    windows = _windows(config, config.size("num_hidden_layers"))
    has_windows = config.get("sliding_window", default=None) or not config.states("sliding_window")
    return {
        "unrotated": tuple(i for i, window in enumerate(windows) if not window) if has_windows else (),
        "qk_norm": True,
        "input_norms": False,
        "output_norms": True,
    }


FAMILY = Family(
    title="EXAONE 4.0",
    defaults={"num_key_value_heads": 32},
    tool_format="hermes",
    layers=_layers,
    windows=_windows,
    norm_eps=1e-5,
    tensors={**OUTPUT_NORMS, **QK_NORMS},
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
