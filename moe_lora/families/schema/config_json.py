# SPDX-License-Identifier: Apache-2.0
"""Values of a config.json by key, with checked types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lora.core.errors import ConfigError

_MISSING: Any = object()
_TIED_INSIDE = ("qwen2_vl", "qwen2_5_vl", "glm4v_moe")
_TIED_BY_TEXT = ("mistral3", "kimi_k25")
"""Classes that write true beside a head of its own."""
TEXT_SECTIONS = ("text_config", "thinker_config")
"""Multimodal sections with keys of the language model."""
LARGEST = 1e30
"""Limit of numbers, so that no formula overflows."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's keys of a multimodal config.json.

    tie_word_embeddings is of the whole model; in _TIED_INSIDE either key ties, in _TIED_BY_TEXT the language
    model's.
    """
    thinker = config.get("thinker_config")
    whole = {**config, **thinker} if isinstance(thinker, Mapping) else config
    part = whole.get("text_config")
    if not isinstance(part, Mapping):
        return whole
    beside = {key: value for key, value in whole.items() if key not in TEXT_SECTIONS}
    tied, kind = beside.get("tie_word_embeddings"), whole.get("model_type")
    by_text = kind in _TIED_BY_TEXT and part.get("tie_word_embeddings") is not None
    if tied is None or by_text or (not tied and kind in _TIED_INSIDE):
        return {**beside, **part}
    return {**beside, **part, "tie_word_embeddings": tied}


class ConfigJson:
    """A config.json.  A dot in a key reads a section, and null counts as absent.

    Several keys are spellings of one option.  Methods raise ConfigError, with the key, for another type, or a
    missing value without a default.
    """

    def __init__(self, content: Mapping[str, Any], section: str = "") -> None:
        self._content, self._prefix = content, f"{section}." if section else ""

    def get(self, *keys: str, default: Any = _MISSING) -> Any:
        """The value, of any type."""
        for key in keys:
            value: Any = self._content
            for depth, part in enumerate(key.split(".")):
                if not isinstance(value, Mapping):
                    section = ".".join(key.split(".")[:depth])
                    raise self.refusal(section, value, "must be an object")
                if (value := value.get(part)) is None:
                    break
            if value is not None:
                return value
        if default is _MISSING:
            names = " or ".join(self._prefix + key for key in keys)
            raise ConfigError(f"config.json has no {names}, which its family needs")
        return default

    def states(self, key: str) -> bool:
        """True if the key is present, null included."""
        section, _, last = key.rpartition(".")
        found = self.get(section, default={}) if section else self._content
        return isinstance(found, Mapping) and last in found

    def size(self, *keys: str, default: Any = _MISSING, least: int = 1) -> int:
        """An integer of `least` or more."""
        value = self.get(*keys, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < LARGEST:
            raise self.refusal(keys[0], value, f"must be an integer of {least} or more")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of integers; absent: empty."""
        value = self.get(key, default=[])
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise self.refusal(key, value, "must be a list of integers")
        return tuple(value)

    def number(self, *keys: str, default: Any = _MISSING, above: float = 0.0) -> float:
        """A number above a limit and below LARGEST; the default is not checked."""
        value = self.get(*keys, default=None)
        if value is None and default is not _MISSING:
            return float(default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not above < value < LARGEST:
            raise self.refusal(keys[0], value, f"must be a number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default=default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "must be true or false")
        return value

    def section(self, *keys: str) -> ConfigJson:
        """A section, empty if absent."""
        value = self.get(*keys, default={})
        if not isinstance(value, Mapping):
            raise self.refusal(keys[0], value, "must be an object")
        return ConfigJson(value, keys[0])

    def require(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ConfigError for an option outside its allowed values."""
        for key, values in allowed.items():
            given = self.get(key, default=None)
            if given is not None and given not in values:
                choices = " or ".join(repr(value) for value in values) or "a config without the key"
                raise self.refusal(key, given, f"is not supported; supported is {choices}")

    def refusal(self, key: str, value: Any, why: str) -> ConfigError:
        """An error about a key's value."""
        return ConfigError(f"config.json has {self._prefix}{key}={value!r}, which {why}")

    def __bool__(self) -> bool:
        return bool(self._content)

    def values(self) -> list[Any]:
        """Values of all keys."""
        return list(self._content.values())
