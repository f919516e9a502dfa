"""Rotary embedding parameters from a config.json, in the old and the new spelling.

Legend: d head_dim, i index of a frequency in [0, d / 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moe_lora.core.errors import ConfigError

from .options import require
from .spec import RopeSpec


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
