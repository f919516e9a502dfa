"""Which meta-parameters each kernel is launched with: committed tables, and an override.

A table is a JSON file `configs/<gpu name>.json`. Its entries are keyed by kernel, dtype, phase and the widths
of the site, never by the batch, because block and split sizes fix the order in which a row is accumulated.
`state` of an entry says whether it was `tuned` on that GPU or is a `default` that nobody has measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .spaces import KERNEL_NAMES, SPACES, Config, check_config, config_space

__all__ = [
    "CONFIG_DIR",
    "FALLBACK",
    "KERNEL_NAMES",
    "PHASES",
    "SPACES",
    "Choice",
    "Config",
    "Entry",
    "Table",
    "check_config",
    "config_space",
    "load_table",
    "matches",
    "override",
    "save_table",
    "table_path",
]

FALLBACK = "default"
PHASES = ("decode", "prefill")
CONFIG_DIR = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a table: `config` of `kernel` where dtype, phase and widths match (None matches any)."""

    kernel: str
    config: Config
    dtype: str | None = None
    phase: str | None = None
    in_features: int | None = None
    out_features: int | None = None
    state: str = "default"

    def __post_init__(self) -> None:
        check_config(self.kernel, self.config)
        if self.state not in ("default", "tuned"):
            raise ValueError(f"state={self.state!r} of {self.kernel} must be 'default' or 'tuned'")
        if self.phase not in (None, *PHASES):
            raise ValueError(f"phase={self.phase!r} of {self.kernel} must be one of {PHASES} or null")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`algorithm` serves adapters of ranks min_rank..max_rank where the rest matches (see `choose`).

    whole: applies to `lora_delta`, where shrink and expand may be one kernel, instead of to both halves.
    """

    algorithm: str
    min_rank: int = 1
    max_rank: int = 512
    dtype: str | None = None
    phase: str | None = None
    in_features: int | None = None
    out_features: int | None = None
    whole: bool = False
    state: str = "default"


@dataclass(frozen=True)
class Table:
    """Launch configurations and algorithm choices of one GPU; of several matches the first counts."""

    gpu: str
    note: str
    entries: tuple[Entry, ...]
    choices: tuple[Choice, ...] = field(default=())

    def config(self, kernel: str, dtype: str, phase: str, in_features: int, out_features: int) -> Config:
        """Configuration of the kernel here: the override if one is active, else the first entry that fits."""
        overridden = _overrides.get().get(kernel)
        if overridden is not None:
            return overridden
        wanted = (dtype, phase, in_features, out_features)
        for entry in self.entries:
            have = (entry.dtype, entry.phase, entry.in_features, entry.out_features)
            if entry.kernel == kernel and matches(have, wanted):
                return entry.config
        raise ValueError(
            f"table {self.gpu!r} has no entry for {kernel} in {dtype} {phase}; add a default one"
        )


_overrides: ContextVar[dict[str, Config]] = ContextVar("overrides", default={})  # noqa: B039
_tables: dict[str, Table] = {}


def matches(have: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Whether each field that is not None equals the wanted one."""
    return all(h is None or h == w for h, w in zip(have, wanted, strict=True))


def load_table(gpu_name: str) -> Table:
    """Table of this GPU (`torch.cuda.get_device_name()`), or the fallback's if none is committed."""
    if gpu_name not in _tables:
        path = table_path(gpu_name)
        data = json.loads((path if path.exists() else table_path(FALLBACK)).read_text())
        _tables[gpu_name] = Table(
            data["gpu"],
            data["note"],
            tuple(Entry(**entry) for entry in data["entries"]),
            tuple(Choice(**choice) for choice in data["choices"]),
        )
    return _tables[gpu_name]


def save_table(table: Table, path: Path | None = None) -> Path:
    """Write the table to `path`, or to where `load_table` finds it; returns the path."""
    path = path or table_path(table.gpu)
    data = {
        "gpu": table.gpu,
        "note": table.note,
        "choices": [_given(choice) for choice in table.choices],
        "entries": [_given(entry) for entry in table.entries],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    _tables.pop(table.gpu, None)
    return path


def table_path(gpu_name: str) -> Path:
    """File of this GPU's table; the name's spaces and slashes become underscores."""
    return CONFIG_DIR / f"{gpu_name.replace(' ', '_').replace('/', '_')}.json"


def _given(row: Entry | Choice) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if value is not None}


@contextmanager
def override(kernel: str, config: Config) -> Iterator[None]:
    """Within the context, launch `kernel` with `config` whatever the table says."""
    check_config(kernel, config)
    token = _overrides.set({**_overrides.get(), kernel: config})
    try:
        yield
    finally:
        _overrides.reset(token)
