"""What a section of a settings file may hold: names, kinds of values, and how a refusal reads."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from moe_lora.core.errors import ConfigError


def dataclass_fields(kind: type, section: str, given: Any, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Keyword arguments of a dataclass, from a section of the file."""
    settings = mapping_of(section, given)
    hints = typing.get_type_hints(kind)
    allowed = [one.name for one in fields(kind) if one.name not in left_out]
    check_names(section, settings, allowed)
    return {name: _value(f"{section}.{name}", value, hints[name]) for name, value in settings.items()}


def _value(setting: str, value: Any, hint: Any) -> Any:
    """The value as the field's type has it."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            item_kind = typing.get_args(kind)[0]
            if isinstance(value, list) and all(type(item) is item_kind for item in value):
                return tuple(value)
        elif type(value) is kind:
            return value
        elif kind is float and type(value) is int:
            return float(value)
    names = " or ".join(_NAMES[kind] for kind in kinds)
    raise ConfigError(f"{setting}={value!r} must be {names}")


_NAMES: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
    tuple[int, ...]: "a list of whole numbers",
    tuple[str, ...]: "a list of texts",
}


def mapping_of(section: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{section} must be a mapping of names to values, not {type(given).__name__}")
    return given


def check_names(section: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    for name in given:
        if name not in allowed:
            place = f"{section}.{name}" if section else str(name)
            raise ConfigError(f"{place} is not a setting; allowed are {', '.join(allowed)}")


def text_of(setting: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{setting}={value!r} must be a text that is not empty")
    return value
