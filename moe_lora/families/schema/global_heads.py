# SPDX-License-Identifier: Apache-2.0
"""Layers of full attention with heads of their own size among layers with a window, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lora.core.attention_shapes import GlobalHeads
from moe_lora.core.errors import ConfigError

from .config_json import ConfigJson
from .family import ATTENTION, LARGEST, Place, windows_by_type
from .rope import RopeSpec, rope_by_kind

KINDS = ("sliding_attention", "full_attention")
GLOBAL_ATTENTION = (
    *ATTENTION,
    *(Place(path=f"self_attn.{name}_proj", site="global_qkv", modules=(i,)) for i, name in enumerate("qkv")),
    *(Place(path=f"self_attn.{name}_proj", site="global_qk", modules=(i,)) for i, name in enumerate("qk")),
    Place(path="self_attn.o_proj", site="global_o"),
)
"""Projections of both kinds of layers; without a v_proj in a layer, its V is K."""
_OVERRIDDEN = ("head_dim", "num_key_value_heads")
_ROPE: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def windows_before_full(config: ConfigJson, num_layers: int, step: int, window: int) -> tuple[int, ...]:
    """sliding_window for the sliding layers.  Raises ConfigError for a last layer with a window.

    step: each step-th layer and the last are full in a config without layer_types.  window: of a config
    without sliding_window.
    """
    last = num_layers - 1
    kinds = [KINDS[not (layer + 1) % step or layer == last] for layer in range(num_layers)]
    windows = windows_by_type(config, config.size("sliding_window", default=window), kinds)
    if windows[-1]:
        kinds = config.get("layer_types")
        raise config.refusal("layer_types", kinds, "must have full_attention in the last layer")
    return windows


def global_heads(config: ConfigJson, windows: tuple[int, ...], head_dim: int) -> GlobalHeads:
    """Heads of the full layers, by global_head_dim and num_global_key_value_heads, or by per_layer_config.

    head_dim: of a config without both keys.  Raises ConfigError for other sizes in some layers.
    """
    layers = tuple(layer for layer, window in enumerate(windows) if not window)
    k_is_v = config.flag("attention_k_eq_v")
    plain = config.size("num_key_value_heads")
    sizes = {
        "head_dim": config.size("global_head_dim", default=head_dim),
        "num_key_value_heads": config.size("num_global_key_value_heads", default=plain) if k_is_v else plain,
    }
    if (given := config.get("per_layer_config", default=None)) is not None:
        sizes = _overridden(config, given, windows)
    if sizes["head_dim"] > LARGEST["head_dim"]:
        raise config.refusal("global_head_dim", sizes["head_dim"], f"must be at most {LARGEST['head_dim']}")
    return GlobalHeads(
        layers=layers,
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        k_is_v=k_is_v,
    )


def _overridden(config: ConfigJson, given: Any, windows: tuple[int, ...]) -> dict[str, int]:
    """The sizes of all full layers in per_layer_config, which transformers 5 writes."""
    plain = {key: config.size(key) for key in _OVERRIDDEN}
    if not isinstance(given, Mapping) or not all(isinstance(one, Mapping) for one in given.values()):
        raise config.refusal("per_layer_config", given, "must have an object for each layer")
    by_layer = {str(layer): one for layer, one in given.items()}
    found = [{**plain, **by_layer.get(str(layer), {})} for layer in range(len(windows))]
    of_full = [sizes for sizes, window in zip(found, windows, strict=True) if not window]
    sliding = [sizes for sizes, window in zip(found, windows, strict=True) if window]
    if any(sizes != of_full[0] for sizes in of_full) or any(sizes != plain for sizes in sliding):
        raise config.refusal("per_layer_config", given, "must state the same sizes for all full layers alone")
    if unknown := of_full[0].keys() - plain.keys():
        raise ConfigError(
            f"config.json has per_layer_config with {', '.join(sorted(unknown))}; supported are "
            f"{' and '.join(_OVERRIDDEN)}"
        )
    section = ConfigJson(of_full[0], "per_layer_config")
    return {key: section.size(key) for key in _OVERRIDDEN}


def rope_of_heads(config: ConfigJson, head_dim: int) -> RopeSpec:
    """Frequencies of the sliding layers, then those of the full layers.  head_dim: of the full layers."""
    sizes = (config.size("head_dim"), head_dim)
    return rope_by_kind(config, {kind: (size, _ROPE[kind]) for kind, size in zip(KINDS, sizes, strict=True)})
