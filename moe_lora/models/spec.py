"""What distinguishes the model families, as data."""

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
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    clip_qkv: float | None = None
    gate: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    gate_norm: float | None = 1.0
    gate_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gpt_oss"] = "silu"
    activation_limit: float = 7.0
    tie_word_embeddings: bool = False


# Options of a config.json that change what a model computes, checked so that none is ignored.


def require(config: Mapping[str, Any], section: str = "", **allowed: tuple[Any, ...]) -> None:
    """Raise ConfigError if an option is present, not null, and not one of its allowed values.

    section: name of the part of config.json that `config` is, for the message.
    """
    for key, values in allowed.items():
        given = config.get(key)
        if given is not None and given not in values:
            name = f"{section}.{key}" if section else key
            choices = " or ".join(repr(value) for value in values) or "no such entry"
            raise ConfigError(
                f"config.json has {name}={given!r}, which is not supported; supported is {choices}"
            )


def require_plain(config: Mapping[str, Any]) -> None:
    """What every family asks for: the SiLU activation and weights that are not quantised."""
    require(config, hidden_act=("silu", "swish"))
    quantisation = config.get("quantization_config")
    if quantisation:
        raise ConfigError(
            f"config.json has quantization_config with quant_method="
            f"{quantisation.get('quant_method')!r}, which is not supported here; "
            "save the checkpoint in bfloat16 or float32"
        )


# Rotary embedding parameters from a config.json, in the old and the new spelling.
#
# Legend: d head_dim, i index of a frequency in [0, d / 2).


def rope_spec(config: Mapping[str, Any], head_dim: int, default_theta: float) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4).

    default_theta: base of a config that names none.  Raises ConfigError for a scaling type or an option
    that is not supported, or a missing parameter.
    """
    section = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    require(section, "rope_parameters", partial_rotary_factor=(1.0,))
    require(config, partial_rotary_factor=(1.0,))
    theta = float(section.get("rope_theta") or config.get("rope_theta") or default_theta)
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
