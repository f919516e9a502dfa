"""Options of a config.json that change what a model computes, checked so that none is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lora.core.errors import ConfigError


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
