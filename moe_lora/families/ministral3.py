# SPDX-License-Identifier: Apache-2.0
"""Ministral 3: dense layers, YaRN.  The context ends at the original context: later queries are scaled."""

from __future__ import annotations

from .schema.family import DENSE_MLP, Family, one_window

FAMILY = Family(
    title="Ministral 3",
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    tool_format="mistral",
    windows=one_window,
    rope={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    norm_eps=1e-5,
    mlp=(DENSE_MLP,),
    adapted=DENSE_MLP,
)
