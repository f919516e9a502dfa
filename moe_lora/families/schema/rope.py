# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding parameters from a config.json.

Legend: d rotated dims of head_dim, i index of a frequency in [0, d / 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_lora.core.errors import ConfigError

from .config_json import ConfigJson

TYPE_KEYS = ("rope_type", "type")
LONGROPE = ("longrope", "su")
"""Phi-3's first files have the second."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Inverse frequencies [rotated dims / 2], and the factor on cos and sin (YaRN).

    full_factor: the same of full layers beside windows.
    """

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    full_factor: float = 1.0


def rope_spec(
    config: ConfigJson,
    head_dim: int,
    theta_keys: tuple[str, ...],
    theta: float,
    default: Mapping[str, Any],
    rotary_factor: float | None,
) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or a base and `rope_scaling` (4).

    theta_keys: of the base outside the section.  theta, default, rotary_factor: base, section and
    partial_rotary_factor if absent; None: all of head_dim is rotated.  Raises ConfigError for an unsupported
    scaling type or option, or a missing or impossible parameter.
    """
    section = _section(config, default)
    if any(isinstance(value, Mapping) for value in section.values()):
        raise ConfigError("config.json has rope_parameters per kind of layer, which is not supported")
    return _rope(config, section, head_dim, theta_keys, theta, rotary_factor)


def rope_by_kind(
    config: ConfigJson, kinds: Mapping[str, tuple[int, Mapping[str, Any]]], *, is_flat: bool = False
) -> RopeSpec:
    """Frequencies of each kind of layer, kind after kind.

    kinds: head_dim, and the section of a config without rope_parameters, or with `is_flat`.
    """
    frequencies: list[float] = []
    factor = 1.0
    for kind, (head_dim, default) in kinds.items():
        section = ConfigJson(default, "rope_parameters")
        if not is_flat and config.section("rope_parameters"):
            section = config.section(f"rope_parameters.{kind}")
            section.get("rope_theta")
        name = section.get(*TYPE_KEYS, default="default")
        _check_even(head_dim)
        if name == "proportional":
            frequencies += _proportional(section, head_dim)
            continue
        section.require({"truncate": (True,)})  # transformers 5.40 reads no other value here
        found = _rope(config, section, head_dim, (), 1e4, None)
        if name in LONGROPE or (found.attention_factor != 1 and kind != "full_attention"):
            raise section.refusal("rope_type", name, "is not supported per kind of layer")
        factor = found.attention_factor
        frequencies += found.inverse_frequencies
    return RopeSpec(inverse_frequencies=tuple(frequencies), full_factor=factor)


def _rope(
    config: ConfigJson,
    section: ConfigJson,
    head_dim: int,
    theta_keys: tuple[str, ...],
    theta: float,
    rotary_factor: float | None,
) -> RopeSpec:
    _check_even(head_dim)
    num_dims = _rotated_dims(config, section, head_dim, rotary_factor)
    theta = section.number(
        "rope_theta", default=config.number(*theta_keys, default=theta, above=1.0), above=1.0
    )
    kind = section.get(*TYPE_KEYS, default="default")
    plain = [theta ** (-2 * i / num_dims) for i in range(num_dims // 2)]
    if kind == "dynamic":  # scales beyond the model's context only
        section.require({"alpha": ()})
        section.number("factor")
    if kind in ("default", "dynamic", "mrope"):  # positions of text make mrope plain
        return RopeSpec(inverse_frequencies=tuple(plain))
    if kind in LONGROPE:
        return _longrope(plain, section, config)
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"rope_type={kind!r} is not supported; supported are default, dynamic, linear, llama3, longrope "
            "and yarn"
        )
    factor = section.number("factor")
    if kind == "linear":
        return RopeSpec(inverse_frequencies=tuple(f / factor for f in plain))
    original = _original_context(section, config)
    if kind == "llama3":
        return RopeSpec(inverse_frequencies=tuple(_llama3(f, section, factor, original) for f in plain))
    ramp = _yarn_ramp(section, original, num_dims, theta)
    return RopeSpec(
        inverse_frequencies=tuple(f * (1 - r) + f / factor * r for f, r in zip(plain, ramp, strict=True)),
        attention_factor=_yarn_attention_factor(section, factor),
    )


def _check_even(head_dim: int) -> None:
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} must be even: rotary embedding turns pairs")


def _proportional(section: ConfigJson, head_dim: int) -> tuple[float, ...]:
    """Frequencies of all of head_dim for the first pairs; the rest does not turn.

    Source: transformers, Gemma 4.
    """
    share = section.number("partial_rotary_factor", default=1.0)
    num_pairs = int(share * head_dim // 2)
    if not 1 <= num_pairs <= head_dim // 2:
        raise section.refusal("partial_rotary_factor", share, f"must turn 1 to {head_dim // 2} pairs of dims")
    theta, factor = section.number("rope_theta", above=1.0), section.number("factor", default=1.0)
    turned = [theta ** (-2 * i / head_dim) / factor for i in range(num_pairs)]
    return (*turned, *[0.0] * (head_dim // 2 - num_pairs))


def context_of(config: ConfigJson, max_position: int, default: Mapping[str, Any]) -> int:
    """Positions with one set of frequencies, and unscaled queries.

    LongRoPE has a second set beyond its original context; llama_4_scaling_beta scales queries there.
    """
    section = _section(config, default)
    is_scaled = section.get("llama_4_scaling_beta", default=0)
    if section.get(*TYPE_KEYS, default="default") not in LONGROPE and not is_scaled:
        return max_position
    return min(max_position, int(_original_context(section, config)))


def _section(config: ConfigJson, default: Mapping[str, Any]) -> ConfigJson:
    section, older = config.section("rope_parameters"), config.section("rope_scaling")
    given = config.get("rope_scaling", default={})
    for key, value in given.items() if section else ():
        names, usual = (TYPE_KEYS, "default") if key in TYPE_KEYS else ((key,), None)
        if value is not None and section.get(*names, default=usual) != value:
            raise config.refusal("rope_scaling", given, "contradicts rope_parameters; keep one of them")
    return section or older or ConfigJson(default, "rope_parameters")


def _original_context(section: ConfigJson, config: ConfigJson) -> float:
    """transformers prefers the key outside the section."""
    key = "original_max_position_embeddings"
    if config.get(key, default=None) is not None:
        return config.number(key, above=1.0)
    return section.number(key, default=config.number("max_position_embeddings", "max_seq_len"), above=1.0)


def _longrope(plain: list[float], section: ConfigJson, config: ConfigJson) -> RopeSpec:
    """A factor per frequency, and an attention factor by the ratio of the contexts.

    Source: LongRoPE (arXiv 2402.13753), and Phi-3's and Phi-3.5-MoE's configurations (short_mscale).
    """
    factors = section.get("short_factor")
    if not isinstance(factors, list) or len(factors) != len(plain):
        raise section.refusal("short_factor", factors, f"must be a list of {len(plain)} numbers")
    numbers = [ConfigJson({"short_factor": one}, "rope_parameters").number("short_factor") for one in factors]
    original = _original_context(section, config)
    longest = config.number("max_position_embeddings", "max_seq_len")
    ratio = section.number("factor", default=longest / original)
    scale = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    scale = section.number("short_mscale", "attention_factor", default=scale)
    frequencies = tuple(f / number for f, number in zip(plain, numbers, strict=True))
    return RopeSpec(inverse_frequencies=frequencies, attention_factor=scale)


def _rotated_dims(config: ConfigJson, section: ConfigJson, head_dim: int, factor: float | None) -> int:
    if factor is None:
        for one in (section, config):
            one.require({"partial_rotary_factor": (1.0,)})
        return head_dim
    share = section.number(
        "partial_rotary_factor", default=config.number("partial_rotary_factor", default=factor)
    )
    num_dims = int(head_dim * share)
    if not 2 <= num_dims <= head_dim or num_dims % 2:
        raise ConfigError(
            f"config.json has partial_rotary_factor={share:g}: {num_dims} of {head_dim} dims are rotated; "
            f"supported is an even number from 2 to {head_dim}"
        )
    return num_dims


def _llama3(frequency: float, section: ConfigJson, factor: float, original: float) -> float:
    """Wavelengths below the original context stay, long ones are stretched by factor, with a ramp between.

    Source: Llama 3.1 model card and reference configuration.
    """
    low = section.number("low_freq_factor")
    high = section.number("high_freq_factor", above=low)
    rotations = original * frequency / (2 * math.pi)
    kept = min(1.0, max(0.0, (rotations - low) / (high - low)))
    return frequency * kept + frequency / factor * (1 - kept)


def _yarn_ramp(section: ConfigJson, original: float, num_dims: int, theta: float) -> list[float]:
    """Share of interpolation per frequency: 0 for fast rotation within the original context, up to 1.

    Source: YaRN (arXiv 2309.00071), section 3.2, "NTK-by-parts".
    """

    def index_of(rotations: float) -> float:
        """The i of the frequency with this many rotations over the original context."""
        return num_dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = index_of(section.number("beta_fast", default=32.0))
    last = index_of(section.number("beta_slow", default=1.0))
    if section.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, num_dims - 1)
    width = (last - first) or 0.001
    return [min(1.0, max(0.0, (i - first) / width)) for i in range(num_dims // 2)]


def _yarn_attention_factor(section: ConfigJson, factor: float) -> float:
    """Factor on cos and sin that keeps the attention's temperature.  Source: YaRN, equation 15."""
    if given := section.number("attention_factor", default=0.0):
        return given

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, all_dim = section.get("mscale", default=0), section.get("mscale_all_dim", default=0)
    if weight and all_dim:
        return mscale(section.number("mscale")) / mscale(section.number("mscale_all_dim"))
    return mscale(1.0)
