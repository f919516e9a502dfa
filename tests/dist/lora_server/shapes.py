# SPDX-License-Identifier: Apache-2.0
"""Small model shapes for partition tests."""

from __future__ import annotations

from moe_lora.core.shape import ModelShape


def model_shape(num_experts: int = 8, num_layers: int = 4) -> ModelShape:
    return ModelShape(
        family="mixtral" if num_experts else "llama",
        num_layers=num_layers,
        hidden_size=32,
        intermediate_size=64,
        num_experts=num_experts,
        num_experts_per_token=min(2, num_experts),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        max_position=128,
        dtype_bytes=2,
    )
