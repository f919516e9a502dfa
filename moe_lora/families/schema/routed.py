# SPDX-License-Identifier: Apache-2.0
"""Routed experts as in DeepSeek's and GLM's configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_json import ConfigJson
from .family import LARGEST, shared_and_dense

ROUTED_SIZES: Mapping[str, tuple[str, ...]] = {
    "intermediate_size": ("moe_intermediate_size",),
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
}
CORRECTION: Mapping[str, str] = {"mlp.correction.weight": "mlp.gate.e_score_correction_bias"}


def gate_groups(
    config: ConfigJson, experts_key: str, chosen_key: str, num_groups: int = 1, top_groups: int = 1
) -> Mapping[str, Any]:
    """`ModelSpec` fields for n_group and topk_group.

    Raises ConfigError for too few experts in groups.
    """
    num_experts, num_chosen = config.size(experts_key), config.size(chosen_key)
    groups, top = config.size("n_group", default=num_groups), config.size("topk_group", default=top_groups)
    if groups == 1:
        return {}
    if num_experts % groups or num_experts < 2 * groups:
        raise config.refusal(
            "n_group", groups, f"must cut {experts_key}={num_experts} in equal groups of 2 or more"
        )
    if top > groups or top * num_experts // groups < num_chosen:
        raise config.refusal(
            "topk_group", top, f"must be at most n_group={groups}, and hold {chosen_key}={num_chosen} experts"
        )
    return {"gate_groups": groups, "top_groups": top}


def corrected_gate(
    config: ConfigJson, scale: float, num_groups: int = 1, top_groups: int = 1
) -> Mapping[str, Any]:
    """Fields of `ModelSpec`: sigmoid scores with a correction, top k within groups, scaled."""
    return {
        "gate": "sigmoid_topk",
        "gate_norm": 1.0 if config.flag("norm_topk_prob", True) else None,
        "gate_correction": True,
        "gate_in_fp32": True,
        **gate_groups(config, "n_routed_experts", "num_experts_per_tok", num_groups, top_groups),
        "routed_scale": config.number("routed_scaling_factor", default=scale),
    }


def later_layers(config: ConfigJson, *keys: str, num_layers: int) -> tuple[str, ...]:
    """Beginnings of the tensors of layers after the last, for multi-token prediction.

    Raises ConfigError for too many.
    """
    first, num = config.size("num_hidden_layers"), config.size(*keys, default=num_layers, least=0)
    if num > LARGEST["num_layers"]:
        raise config.refusal(keys[0], num, f"must be at most {LARGEST['num_layers']}")
    return tuple(f"model.layers.{first + number}." for number in range(num))


def leading_dense(config: ConfigJson, num_layers: int, num_dense: int, num_shared: int) -> Mapping[str, Any]:
    """Fields of `ModelShape`: shared experts, and dense layers by first_k_dense_replace."""
    num_dense = min(config.size("first_k_dense_replace", default=num_dense, least=0), num_layers)
    num_shared = config.size("n_shared_experts", default=num_shared, least=0)
    return shared_and_dense(config, num_shared, range(num_dense))
