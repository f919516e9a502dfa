"""Profiles as JSON files (fields: docs/reference/profiles.md): those shipped, and a user's own.

Two kinds: "tables" holds measured times of one model at some batch sizes, "roofline" only rates and fixed
latencies.
"""

from __future__ import annotations

import json
import math
from collections.abc import ItemsView, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from moe_lora.core.errors import ConfigError

from .profile import Efficiency, FixedTimes, Gpu, Profile, ServerTables, Sizes, Table, Tables

# Typed reading of a JSON object, with errors that name the field.


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


KINDS = ("tables", "roofline")
_FOLDER = "profiles"


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    folder = resources.files(__package__) / _FOLDER
    return tuple(sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".json")))


def read_profile(name_or_path: str | Path) -> Profile:
    """The shipped profile of that name, or the one in that file.

    Raises ConfigError, naming file and field, for anything that can't be right.
    """
    if str(name_or_path) in shipped_profiles():
        text = (resources.files(__package__) / _FOLDER / f"{name_or_path}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"hardware {str(name_or_path)!r} is neither a readable file nor a shipped profile; "
                f"shipped are {', '.join(shipped_profiles())}; `moe-lora profile` writes one of this machine"
            ) from error
    try:
        return _profile(Section("", json.loads(text)))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name_or_path}: not JSON ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{name_or_path}: {error}") from error


def _profile(top: Section) -> Profile:
    kind = top.text("kind")
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    needs = {"tables": ("taken_at", "batches", "server_us", "base_us"), "roofline": ("efficiency",)}[kind]
    top.only("name", "kind", "gpu", "fixed_us", "sources", *needs)
    gpu = _gpu(top.section("gpu"), rates_needed=kind == "roofline")
    return Profile(
        name=top.text("name"),
        gpu=gpu,
        fixed=_fixed(top.section("fixed_us", optional=True)),
        tables=_tables(top) if kind == "tables" else None,
        efficiency=_efficiency(top.section("efficiency")) if kind == "roofline" else None,
        sources={key: str(value) for key, value in top.section("sources", optional=True).items()},
    )


def _gpu(section: Section, *, rates_needed: bool) -> Gpu:
    rates = ("bytes_per_s", "flop_per_s", "net_bytes_per_s")
    shares = ("instance_memory_share", "server_memory_share")
    section.only("memory_gib", *shares, "load_bytes_per_s", *rates)
    return Gpu(
        memory_bytes=section.number("memory_gib") * 2**30,
        load_bytes_per_s=section.number("load_bytes_per_s"),
        **{name: section.number(name, most=1.0) for name in shares},
        **{name: section.number(name) for name in rates if rates_needed or section.has(name)},
    )


def _fixed(section: Section) -> FixedTimes:
    names = ("receive", "compute", "send", "attention", "sync_per_rank")
    section.only(*names)
    given = [name for name in names if section.has(name)]
    return FixedTimes(**{f"{name}_s": section.number(name, zero=True) * 1e-6 for name in given})


def _efficiency(section: Section) -> Efficiency:
    section.only("memory", "flop", "net")
    return Efficiency(**{name: section.number(name, most=1.0) for name in ("memory", "flop", "net")})


def _tables(top: Section) -> Tables:
    batches = top.numbers("batches")
    server: dict[int, ServerTables] = {}
    for key, stages in top.section("server_us").sections():
        if not key.isdigit() or int(key) < 1:
            raise ConfigError(f"server_us.{key}: keys are EP degrees, whole numbers of 1 or more")
        stages.only("receive", "compute", "send")
        server[int(key)] = ServerTables(
            **{name: stages.table(name, batches) for name in ("receive", "compute", "send")}
        )
    if not server:
        raise ConfigError("server_us is empty; give receive, compute and send of one EP degree at least")
    base = top.section("base_us")
    base.only("experts", "attention")
    return Tables(
        taken_at=_sizes(top.section("taken_at")),
        server=dict(sorted(server.items())),
        experts=base.table("experts", batches),
        attention=base.table("attention", batches) if base.has("attention") else None,
    )


def _sizes(section: Section) -> Sizes:
    names = ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_token")
    counts = (*names, "instance_gpus", "value_bytes")
    section.only("model", "lora_rank", *counts)
    return Sizes(lora_rank=section.number("lora_rank"), **{name: section.count(name) for name in counts})
