# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4: dense layers, one matrix for q, k and v, and another for gate and up; LongRoPE."""

from __future__ import annotations

from .schema.family import Family, Place, one_window, rope_types

MLP = (Place(path="mlp.gate_up_proj", site="gate_up"), Place(path="mlp.down_proj", site="down"))
FAMILY = Family(
    title="Phi-3",
    defaults={"original_max_position_embeddings": 4096},
    fused_qkv=True,
    fused_gate_up=True,
    supported=rope_types("default", "longrope", "su"),
    windows=one_window,
    rotary_factor=1.0,
    norm_eps=1e-5,
    attention=(
        Place(path="self_attn.qkv_proj", site="qkv"),
        Place(path="self_attn.o_proj", site="o"),
    ),
    mlp=(MLP,),
    adapted=MLP,
)
