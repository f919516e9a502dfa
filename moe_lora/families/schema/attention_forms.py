# SPDX-License-Identifier: Apache-2.0
"""Forms of attention as data: latents, Gated DeltaNet, and full layers' own heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moe_lora.core.attention_shapes import DeltaShape, GlobalHeads, MlaShape
from moe_lora.core.errors import ConfigError

from .config_json import ConfigJson
from .family import ATTENTION, LARGEST, SIZES, TENSORS, Place, linear_mlp, windows_by_type
from .rope import RopeSpec, rope_by_kind
from .routed import ROUTED_SIZES

LATENT_SIZES: Mapping[str, tuple[str, ...]] = {
    **{name: keys for name, keys in SIZES.items() if name not in ("num_kv_heads", "head_dim")},
    **ROUTED_SIZES,
}
"""Sizes beside those of `latent_shape`."""
LATENT_TENSORS: Mapping[str, str] = {
    **TENSORS,
    "attention.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm.weight",
}
LATENT_ATTENTION = (
    Place(path="self_attn.q_proj", site="q"),
    Place(path="self_attn.q_a_proj", site="q_a"),
    Place(path="self_attn.q_b_proj", site="q_b"),
    Place(path="self_attn.kv_a_proj_with_mqa", site="kv_a"),
    Place(path="self_attn.kv_b_proj", site="latent_k", form="heads"),
    Place(path="self_attn.o_proj", site="o"),
)
LATENT_BESIDE = (*linear_mlp("mlp.shared_experts", kind="shared_"), *linear_mlp("mlp", kind="dense_"))
NO_SPARSE_ATTENTION: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    ("index_topk", "index_n_heads", "index_head_dim"), ()
)
"""Keys of DeepSeek Sparse Attention, unsupported."""
_LARGEST = 65_536


def latent_shape(config: ConfigJson, q_rank: int, nope_dim: int = 128, v_dim: int = 128) -> Mapping[str, Any]:
    """Fields of `ModelShape`; defaults for absent keys.

    A stated q_lora_rank of null means no latent of queries.  Raises ConfigError for grouped heads.
    """
    heads = config.size("num_attention_heads")
    if (groups := config.size("num_key_value_heads", default=heads)) != heads:
        raise config.refusal(
            "num_key_value_heads", groups, f"must be num_attention_heads={heads} in latent attention"
        )
    stated = config.states("q_lora_rank")
    sizes = MlaShape(
        q_rank=config.size("q_lora_rank", default=0 if stated else q_rank, least=0),
        kv_rank=config.size("kv_lora_rank", default=512),
        nope_dim=config.size("qk_nope_head_dim", default=nope_dim),
        rope_dim=config.size("qk_rope_head_dim", default=64, least=2),
        v_dim=config.size("v_head_dim", default=v_dim),
    )
    if sizes.cached_dim > _LARGEST:
        raise config.refusal("kv_lora_rank", sizes.kv_rank, f"and rotated dims must be at most {_LARGEST}")
    return {"mla": sizes, "num_kv_heads": 1, "head_dim": sizes.cached_dim}


def latent_scale(config: ConfigJson, nope_dim: int = 128) -> Mapping[str, Any]:
    """Fields of `ModelSpec`: the factor on q @ k, enlarged by a scaled rotation with mscale_all_dim."""
    size = config.size("qk_nope_head_dim", default=nope_dim) + config.size("qk_rope_head_dim", default=64)
    section = config.section("rope_parameters", "rope_scaling")
    scale = 1.0
    kind = section.get("rope_type", "type", default="default")
    if kind != "default" and (weight := section.number("mscale_all_dim", default=0.0, above=-1.0)):
        factor = section.number("factor")
        scale = 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    return {"attention_multiplier": size**-0.5 * scale * scale}


_MIXERS = ("linear_attention", "full_attention")
DELTA_TENSORS: Mapping[str, str] = {
    "attention.conv": "linear_attn.conv1d.weight",
    "attention.decay.weight": "linear_attn.A_log",
    "attention.time_bias.weight": "linear_attn.dt_bias",
    "attention.gated_norm": "linear_attn.norm.weight",
}
"""A DeltaNet layer's parameters without a LoRA site, and their tensors."""
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
    """Fields of `ModelShape`: DeltaNet layers by layer_types or full_attention_interval.

    Raises ConfigError for an unknown kind of layer.
    """
    interval = config.size("full_attention_interval", default=4)
    kinds = [_MIXERS[(layer + 1) % interval == 0] for layer in range(num_layers)]
    given = config.get("layer_types", default=kinds)
    if not isinstance(given, list) or len(given) != num_layers or not all(kind in _MIXERS for kind in given):
        raise config.refusal(
            "layer_types", given, f"must be a list of {num_layers} of {' or '.join(_MIXERS)}"
        )
    layers = tuple(layer for layer, kind in enumerate(given) if kind == _MIXERS[0])
    heads = {
        "num_k_heads": config.size("linear_num_key_heads", default=16),
        "num_v_heads": config.size("linear_num_value_heads", default=32),
        "k_dim": config.size("linear_key_head_dim", default=128),
        "v_dim": config.size("linear_value_head_dim", default=128),
        "conv_width": config.size("linear_conv_kernel_dim", default=4, least=2),
    }
    delta = DeltaShape(layers=layers, is_interleaved=is_interleaved, **heads)
    return {"gated_q": True, "delta": delta if layers else None}


_WINDOWS = ("sliding_attention", "full_attention")
GLOBAL_ATTENTION = (
    *ATTENTION,
    *(Place(path=f"self_attn.{name}_proj", site="global_qkv", modules=(i,)) for i, name in enumerate("qkv")),
    *(Place(path=f"self_attn.{name}_proj", site="global_qk", modules=(i,)) for i, name in enumerate("qk")),
    Place(path="self_attn.o_proj", site="global_o"),
)
"""Projections of both kinds of layers; without a v_proj, V is K."""
_OVERRIDDEN = ("head_dim", "num_key_value_heads")
_ROPE: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def windows_before_full(config: ConfigJson, num_layers: int, step: int, window: int) -> tuple[int, ...]:
    """sliding_window for the sliding layers.  Raises ConfigError for a last layer with a window.

    step: each step-th layer and the last are full without layer_types.
    """
    last = num_layers - 1
    kinds = [_WINDOWS[not (layer + 1) % step or layer == last] for layer in range(num_layers)]
    windows = windows_by_type(config, config.size("sliding_window", default=window), kinds)
    if windows[-1]:
        kinds = config.get("layer_types")
        raise config.refusal("layer_types", kinds, "must have full_attention in the last layer")
    return windows


def global_heads(config: ConfigJson, windows: tuple[int, ...], head_dim: int) -> GlobalHeads:
    """Heads of the full layers, by global_head_dim and num_global_key_value_heads, or by per_layer_config.

    head_dim: without both keys.  Raises ConfigError for unequal sizes.
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
    """Full layers' sizes in per_layer_config, written by transformers 5."""
    plain = {key: config.size(key) for key in _OVERRIDDEN}
    if not isinstance(given, Mapping) or not all(isinstance(one, Mapping) for one in given.values()):
        raise config.refusal("per_layer_config", given, "must have an object for each layer")
    try:
        by_layer = {int(layer): one for layer, one in given.items()}  # "05"
    except ValueError:
        raise config.refusal("per_layer_config", given, "must have numbers of layers as keys") from None
    found = [{**plain, **by_layer.get(layer, {})} for layer in range(len(windows))]
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
    """Frequencies of the sliding layers, then of the full layers."""
    sizes = (config.size("head_dim"), head_dim)
    kinds = {kind: (size, _ROPE[kind]) for kind, size in zip(_WINDOWS, sizes, strict=True)}
    rope = rope_by_kind(config, kinds)
    if rope.full_factor != 1:
        full = config.get("rope_parameters.full_attention")
        raise config.refusal("rope_parameters.full_attention", full, "is not supported: it scales attention")
    return rope


def rope_by_window(config: ConfigJson, theta: float, local: float | None = None) -> Mapping[str, Any]:
    """Fields of `ModelSpec`: frequencies of the sliding layers, then of the full layers.

    theta: without rope_theta.  local: base of the sliding layers without rope_parameters; None: the full
    layers'.  rope_scaling, and rope_parameters without kinds, are of the full layers.
    """
    given = config.section("rope_parameters")
    if given:
        config.require({"rope_scaling": ()})
    is_flat = not any(map(given.states, _WINDOWS))
    size = config.size("head_dim", default=config.size("hidden_size") // config.size("num_attention_heads"))
    base = config.number("rope_parameters.rope_theta", "rope_theta", default=theta, above=1.0)
    scaling = config.get("rope_parameters" if given and is_flat else "rope_scaling", default={})
    sections = ({"rope_theta": local or base}, {**scaling, "rope_theta": base})
    kinds = {kind: (size, section) for kind, section in zip(_WINDOWS, sections, strict=True)}
    return {"rope": rope_by_kind(config, kinds, is_flat=is_flat), "rope_by_window": True}
