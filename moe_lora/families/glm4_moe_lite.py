# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash: latent attention, dense layers by list, a shared expert, corrected sigmoid gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema.attention_forms import (
    LATENT_ATTENTION,
    LATENT_BESIDE,
    LATENT_SIZES,
    LATENT_TENSORS,
    NO_SPARSE_ATTENTION,
    latent_scale,
    latent_shape,
)
from .schema.config_json import ConfigJson
from .schema.family import Family, shared_and_dense
from .schema.routed import CORRECTION, corrected_gate, later_layers

_KINDS = ("dense", "sparse")


def _layers(config: ConfigJson) -> Mapping[str, Any]:
    return {
        **latent_scale(config, nope_dim=192),
        "attention_bias": config.flag("attention_bias"),
        "rotates_neighbours": config.flag("rope_interleave", True),
        **corrected_gate(config, 1.8),
        "unused": later_layers(config, "num_nextn_predict_layers", num_layers=1),
    }


def _beside(config: ConfigJson, num_layers: int) -> Mapping[str, Any]:
    default = [*_KINDS[:1], *[_KINDS[1]] * (num_layers - 1)]
    kinds = config.get("mlp_layer_types", default=default)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in _KINDS for kind in kinds):
        raise config.refusal("mlp_layer_types", kinds, f"must be a list of {num_layers} of dense or sparse")
    num_shared = config.size("n_shared_experts", default=1, least=0)
    dense = (layer for layer, kind in enumerate(kinds) if kind == "dense")
    return {
        **latent_shape(config, q_rank=768, nope_dim=192, v_dim=256),
        **shared_and_dense(config, num_shared, dense),
    }


FAMILY = Family(
    title="GLM-4.7-Flash",
    tool_format="glm4",
    sizes=LATENT_SIZES,
    supported=NO_SPARSE_ATTENTION,
    layers=_layers,
    beside_experts=_beside,
    norm_eps=1e-5,
    tensors={**LATENT_TENSORS, **CORRECTION},
    attention=LATENT_ATTENTION,
    beside=LATENT_BESIDE,
)
