# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers among layers of attention, as data: keys of config.json, tensors, LoRA pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lora.core.attention_shapes import DeltaShape

from .config_json import ConfigJson
from .family import Place

KINDS = ("linear_attention", "full_attention")
DELTA_TENSORS: Mapping[str, str] = {
    "attention.conv": "linear_attn.conv1d.weight",
    "attention.decay.weight": "linear_attn.A_log",
    "attention.time_bias.weight": "linear_attn.dt_bias",
    "attention.gated_norm": "linear_attn.norm.weight",
}
"""Parameters of a DeltaNet layer without a LoRA site, and their tensors below the layer."""
_OUT = Place(path="linear_attn.out_proj", site="delta_out")
INTERLEAVED_DELTA = (
    Place(path="linear_attn.in_proj_qkvz", site="delta_qkvz"),
    Place(path="linear_attn.in_proj_ba", site="delta_ba"),
    _OUT,
)
"""Projections with outputs grouped by key head."""
DELTA = (
    Place(path="linear_attn.in_proj_qkv", site="delta_qkvz"),
    Place(path="linear_attn.in_proj_z", site="delta_qkvz", modules=(1,)),
    Place(path="linear_attn.in_proj_b", site="delta_ba"),
    Place(path="linear_attn.in_proj_a", site="delta_ba", modules=(1,)),
    _OUT,
)
"""Projections with a matrix each."""


def delta_layers(config: ConfigJson, num_layers: int, *, is_interleaved: bool) -> Mapping[str, Any]:
    """Fields of `ModelShape`: gated attention, and DeltaNet layers by layer_types or full_attention_interval.

    Raises ConfigError for an unknown kind of layer.
    """
    interval = config.size("full_attention_interval", default=4)
    kinds = [KINDS[(layer + 1) % interval == 0] for layer in range(num_layers)]
    given = config.get("layer_types", default=kinds)
    if not isinstance(given, list) or len(given) != num_layers or not all(kind in KINDS for kind in given):
        raise config.refusal("layer_types", given, f"must be a list of {num_layers} of {' or '.join(KINDS)}")
    layers = tuple(layer for layer, kind in enumerate(given) if kind == KINDS[0])
    heads = {
        "num_k_heads": config.size("linear_num_key_heads", default=16),
        "num_v_heads": config.size("linear_num_value_heads", default=32),
        "k_dim": config.size("linear_key_head_dim", default=128),
        "v_dim": config.size("linear_value_head_dim", default=128),
        "conv_width": config.size("linear_conv_kernel_dim", default=4, least=2),
    }
    delta = DeltaShape(layers=layers, is_interleaved=is_interleaved, **heads)
    return {"gated_q": True, "delta": delta if layers else None}
