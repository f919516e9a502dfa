# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: dense layers, norms after attention and MLP alone, RMS norms over all heads of q and of k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.config_json import ConfigJson
from .schema.family import DENSE_MLP, FULL_QK_NORMS, OUTPUT_NORMS, Family


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    bias = config.flag("attention_bias")
    return {"full_qk_norm": True, "input_norms": False, "output_norms": True, "attention_bias": bias}


FAMILY = Family(
    title="OLMo 2",
    layers=_layers,
    norm_eps=1e-5,
    tensors={**OUTPUT_NORMS, **FULL_QK_NORMS},
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
