"""Rotary embedding parameters from a config.json, in the old and the new spelling."""

from __future__ import annotations

from typing import Any

from moe_lora.core.errors import ConfigError

from .spec import RopeSpec


def rope_spec(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4).

    Raises ConfigError for a scaling type that is not supported.
    """
    section = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(section.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = section.get("rope_type") or section.get("type") or "default"
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "default":
        return RopeSpec(inverse_frequencies=tuple(plain))
    raise ConfigError(f"rope_type={kind!r} is not supported; supported is default")
