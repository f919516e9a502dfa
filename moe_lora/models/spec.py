# SPDX-License-Identifier: Apache-2.0
"""What distinguishes the model families, as data, read from a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: inverse frequencies [head_dim / 2] and the factor on cos and sin (YaRN)."""

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model's architecture; sizes are in `shape`.

    clip_qkv: q, k and v are clamped to +- this value, None = not.  window: attention window per layer in
    tokens, 0 = full.  gate: "softmax_topk" takes the top k of the softmax over all experts, "topk_softmax"
    the softmax over the top k logits.  gate_norm: p of the p-norm that divides the chosen weights, None = not
    normalised.  activation: "silu" is silu(gate) * up, "gpt_oss" its clamped form.
    """

    shape: ModelShape
    rope: RopeSpec
    norm_eps: float
    window: tuple[int, ...]
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    attention_bias: bool = False
    sinks: bool = False
    clip_qkv: float | None = None
    gate: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    gate_norm: float | None = 1.0
    gate_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gpt_oss"] = "silu"
    activation_limit: float = 7.0
    tie_word_embeddings: bool = False


DBRX_NORM_EPS = 1e-5  # not in DBRX's config.json: torch's default
_DEFAULT_THETA_AND_EPS = {
    "llama": (1e4, 1e-6),
    "mixtral": (1e6, 1e-5),
    "qwen3_moe": (1e4, 1e-6),
    "gpt_oss": (150000.0, 1e-5),
    "dbrx": (1e4, DBRX_NORM_EPS),
}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that a config.json describes.

    Raises ConfigError for a family or an option that is not supported.
    """
    shape = ModelShape.from_hf_config(config)
    _require(config, hidden_act=("silu", "swish"))
    theta, eps = _DEFAULT_THETA_AND_EPS[shape.family]
    fields: dict[str, Any] = {
        "norm_eps": config.get("rms_norm_eps", eps),
        "window": (0,) * shape.num_layers,
        "attention_bias": bool(config.get("attention_bias", shape.family == "gpt_oss")),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
    }
    fields |= _family_fields(config, shape)
    return ModelSpec(shape=shape, rope=_rope_spec(config, shape, theta), **fields)


def _family_fields(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Where the family's models differ from those that leave `ModelSpec` at its defaults."""
    window = config.get("sliding_window") or 0
    match shape.family:
        case "llama":
            return {"mlp_bias": bool(config.get("mlp_bias"))}
        case "mixtral":
            _require(config, attention_bias=(False,))
            return {"window": (window,) * shape.num_layers}
        case "qwen3_moe":
            return {
                "qk_norm": True,
                "window": (window if config.get("use_sliding_window") else 0,) * shape.num_layers,
                "gate_norm": 1.0 if config.get("norm_topk_prob") else None,
            }
        case "dbrx":
            attention, ffn = config.get("attn_config") or {}, config.get("ffn_config") or {}
            _require(config, tie_word_embeddings=(False,))
            _require(ffn.get("ffn_act_fn") or {}, "ffn_config.ffn_act_fn", name=("silu",))
            return {
                "norm": "layer",
                "clip_qkv": attention.get("clip_qkv"),
                "gate_norm": ffn.get("moe_normalize_expert_weights", 1.0),
            }
    _require(config, swiglu_alpha=(1.702,))
    return {
        "window": _windows(config, shape.num_layers, window),
        "sinks": True,
        "gate": "topk_softmax",
        "gate_bias": True,
        "mlp_bias": True,
        "activation": "gpt_oss",
        "activation_limit": config.get("swiglu_limit", 7.0),
    }


def _windows(config: Mapping[str, Any], num_layers: int, window: int) -> tuple[int, ...]:
    """Attention window of each layer of GPT-OSS; without layer_types every other layer slides."""
    pattern = ("sliding_attention", "full_attention")
    kinds = config.get("layer_types") or [pattern[layer % 2] for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(pattern):
        raise ConfigError(
            f"config.json has layer_types={kinds!r}; needed are {num_layers} of {' or '.join(pattern)}"
        )
    return tuple(window if kind == pattern[0] else 0 for kind in kinds)


def _require(config: Mapping[str, Any], section: str = "", **allowed: tuple[Any, ...]) -> None:
    """Raise ConfigError if an option is present, not null, and not one of its allowed values.

    section: name of the part of config.json that `config` is, for the message.
    """
    for key, values in allowed.items():
        given = config.get(key)
        if given is not None and given not in values:
            name = f"{section}.{key}" if section else key
            choices = " or ".join(repr(value) for value in values)
            raise ConfigError(
                f"config.json has {name}={given!r}, which is not supported; supported is {choices}"
            )


# Rotary embedding parameters from a config.json, in the old and the new spelling.
#
# Legend: d head_dim, i index of a frequency in [0, d / 2).


def _rope_spec(config: Mapping[str, Any], shape: ModelShape, default_theta: float) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4).

    default_theta: base of a config that names none.  Raises ConfigError for a scaling type or an option
    that is not supported, or a missing parameter.
    """
    head_dim, attention = shape.head_dim, config.get("attn_config") or {}
    section = config.get("rope_parameters") or config.get("rope_scaling")
    if not section:
        section = _GPT_OSS_YARN if shape.family == "gpt_oss" else {}
    _require(section, "rope_parameters", partial_rotary_factor=(1.0,))
    _require(config, partial_rotary_factor=(1.0,))
    thetas = (section.get("rope_theta"), config.get("rope_theta"), attention.get("rope_theta"))
    theta = float(next(filter(None, thetas), default_theta))
    kind = section.get("rope_type") or section.get("type") or "default"
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "default":
        return RopeSpec(inverse_frequencies=tuple(plain))
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"rope_type={kind!r} is not supported; supported are default, linear, llama3 and yarn"
        )
    factor = _number(section, "factor")
    if kind == "linear":
        return RopeSpec(inverse_frequencies=tuple(f / factor for f in plain))
    if kind == "llama3":
        return RopeSpec(inverse_frequencies=tuple(_llama3(f, section, factor) for f in plain))
    ramp = _yarn_ramp(section, head_dim, theta)
    return RopeSpec(
        inverse_frequencies=tuple(f * (1 - r) + f / factor * r for f, r in zip(plain, ramp, strict=True)),
        attention_factor=_yarn_attention_factor(section, factor),
    )


def _number(section: Mapping[str, Any], key: str) -> float:
    if not isinstance(section.get(key), (int, float)):
        raise ConfigError(
            f"config.json has {key}={section.get(key)!r} in its rope parameters; a number is needed"
        )
    return float(section[key])


def _llama3(frequency: float, section: Mapping[str, Any], factor: float) -> float:
    """Wavelengths below the original context stay, long ones are stretched by factor, with a ramp between.

    Source: Llama 3.1 model card and reference configuration.
    """
    low, high = _number(section, "low_freq_factor"), _number(section, "high_freq_factor")
    rotations = _number(section, "original_max_position_embeddings") * frequency / (2 * math.pi)
    kept = min(1.0, max(0.0, (rotations - low) / (high - low)))
    return frequency * kept + frequency / factor * (1 - kept)


def _yarn_ramp(section: Mapping[str, Any], head_dim: int, theta: float) -> list[float]:
    """Share of interpolation per frequency: 0 where it rotates often within the original context, up to 1.

    Source: YaRN (arXiv 2309.00071), section 3.2, "NTK-by-parts".
    """
    context = _number(section, "original_max_position_embeddings")

    def index_of(rotations: float) -> float:
        """The i whose frequency makes this many rotations over the original context."""
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = index_of(section.get("beta_fast") or 32.0)
    last = index_of(section.get("beta_slow") or 1.0)
    if section.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    return [min(1.0, max(0.0, (i - first) / width)) for i in range(head_dim // 2)]


def _yarn_attention_factor(section: Mapping[str, Any], factor: float) -> float:
    """Factor on cos and sin that keeps the attention's temperature.  Source: YaRN, equation 15."""
    if section.get("attention_factor") is not None:
        return float(section["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if section.get("mscale") and section.get("mscale_all_dim"):
        return mscale(section["mscale"]) / mscale(section["mscale_all_dim"])
    return mscale(1.0)
