"""Typed reading of a JSON object, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import ItemsView, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_lora.core.errors import ConfigError

from .tables import Table


@contextmanager
def file_fields(path: str | Path, writer: str) -> Iterator[Section]:
    """The JSON object in a file.  writer: the command that writes such a file, for who has none.

    Raises ConfigError naming the file, also for one that is raised while its fields are read.
    """
    try:
        top = Section("", json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `{writer}` writes one") from error
    except ValueError as error:  # no JSON, no UTF-8, no object
        raise ConfigError(f"{path}: not a JSON object ({error})") from error
    try:
        yield top
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class Section:
    """One JSON object of a profile; `name` is its place in the file.  All readers raise ConfigError."""

    def __init__(self, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{name or 'the file'} must be a JSON object, not {type(value).__name__}")
        self.name = name
        self._value: dict[str, Any] = value

    def only(self, *allowed: str) -> None:
        for key in self._value:
            if key not in allowed:
                raise ConfigError(f"{self._place(key)} is not a field; allowed are {', '.join(allowed)}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self._value.get(key) is not None

    def items(self) -> ItemsView[str, Any]:
        return self._value.items()

    def section(self, key: str, *, optional: bool = False) -> Section:
        return Section(self._place(key), {} if optional and not self.has(key) else self._get(key))

    def sections(self) -> Iterator[tuple[str, Section]]:
        for key in self._value:
            yield key, self.section(key)

    def list_of_sections(self, key: str) -> list[Section]:
        """A list of objects."""
        value = self._get(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self._place(key)} must be a list, not {type(value).__name__}")
        return [Section(f"{self._place(key)}[{i}]", item) for i, item in enumerate(value)]

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self._place(key)}={value!r} must be a text that is not empty")
        return value

    def number(self, key: str, *, most: float = math.inf, zero: bool = False) -> float:
        """A finite number above 0 (or of 0, with `zero`), at most `most`."""
        value = self._get(key)
        if not _is_number(value) or value > most or not (value > 0 or (zero and value == 0)):
            limit = f" and at most {most:g}" if most < math.inf else ""
            raise ConfigError(
                f"{self._place(key)}={value!r} must be a finite number {'>=' if zero else '>'} 0{limit}"
            )
        return float(value)

    def count(self, key: str) -> int:
        value = self._get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self._place(key)}={value!r} must be a whole number of 1 or more")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key)
        if not isinstance(value, list) or not all(_is_number(item) for item in value):
            raise ConfigError(f"{self._place(key)}={value!r} must be a list of finite numbers")
        return tuple(float(item) for item in value)

    def table(self, key: str, batches: tuple[float, ...]) -> Table:
        """Microseconds, one a batch."""
        try:
            return Table(batches, tuple(micros * 1e-6 for micros in self.numbers(key)))
        except ConfigError as error:
            raise ConfigError(f"{self._place(key)}: {error}") from error

    def _get(self, key: str) -> Any:
        if not self.has(key):
            raise ConfigError(f"{self._place(key)} is missing")
        return self._value[key]

    def _place(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
