"""Which meta-parameters each kernel is launched with: committed tables, and an override.

A table is a JSON file `configs/<gpu name>.json`. Its entries are keyed by kernel, dtype, phase and the widths
of the site. What fixes the order in which a row is accumulated (the algorithm, and `spaces.ORDER_FIXING`)
must not depend on the phase, as a decode row has a prefill chunk beside it in one step and none in the next:
a table that breaks this is refused. Only tiles of tokens, stages and grids may differ by phase.
`state` of an entry says whether it was `tuned` on that GPU or is a `default` that nobody has measured.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_lora.core.shape import MAX_LORA_RANK

from .spaces import KERNEL_NAMES, ORDER_FIXING, SPACES, Config, check_config, config_space, order_of

__all__ = [
    "CONFIG_DIR",
    "DTYPES",
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
DTYPES = ("bf16", "fp16", "fp32")
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

    It has no phase: the algorithm fixes the order of sums.  whole: applies to a `lora_delta` that may be one
    kernel (`allow_fused`), instead of to both halves.
    """

    algorithm: str
    min_rank: int = 1
    max_rank: int = MAX_LORA_RANK
    dtype: str | None = None
    in_features: int | None = None
    out_features: int | None = None
    whole: bool = False
    state: str = "default"


@dataclass(frozen=True)
class Table:
    """Launch configurations and algorithm choices of one GPU; of several matches the first counts.

    Raises ValueError if the phases of one place have configurations that add a row in different orders.
    """

    gpu: str
    note: str
    entries: tuple[Entry, ...]
    choices: tuple[Choice, ...] = field(default=())

    def __post_init__(self) -> None:
        for kernel in KERNEL_NAMES:
            self._check_phases(kernel)

    def _check_phases(self, kernel: str) -> None:
        """Look at every place that the kernel's entries tell apart, and at one that they don't name."""
        rows = [entry for entry in self.entries if entry.kernel == kernel]
        in_widths = {entry.in_features or 0 for entry in rows} | {0}
        out_widths = {entry.out_features or 0 for entry in rows} | {0}
        for place in itertools.product(DTYPES, in_widths, out_widths):
            dtype, *widths = place
            found = [_first_fit(rows, (dtype, phase, *widths)) for phase in PHASES]
            orders = {order_of(kernel, entry.config) for entry in found if entry is not None}
            if len(orders) > 1:
                raise ValueError(
                    f"table {self.gpu!r} has {kernel} in {dtype} for widths {widths} (0: any other) add rows "
                    f"in different orders in decode and in prefill: {ORDER_FIXING[kernel]} are "
                    f"{sorted(orders)}; give both phases the same"
                )

    def config(self, kernel: str, dtype: str, phase: str, in_features: int, out_features: int) -> Config:
        """Configuration of the kernel here: the override if one is active, else the first entry that fits."""
        overridden = _overrides.get().get(kernel)
        if overridden is not None:
            return overridden
        rows = (entry for entry in self.entries if entry.kernel == kernel)
        entry = _first_fit(rows, (dtype, phase, in_features, out_features))
        if entry is None:
            raise ValueError(
                f"table {self.gpu!r} has no entry for {kernel} in {dtype} {phase}; add a default one"
            )
        return entry.config


_overrides: ContextVar[dict[str, Config]] = ContextVar("overrides", default={})  # noqa: B039
_tables: dict[str, Table] = {}


def matches(have: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Whether each field that is not None equals the wanted one."""
    return all(h is None or h == w for h, w in zip(have, wanted, strict=True))


def _first_fit(entries: Iterable[Entry], wanted: tuple[Any, ...]) -> Entry | None:
    for entry in entries:
        if matches((entry.dtype, entry.phase, entry.in_features, entry.out_features), wanted):
            return entry
    return None


def load_table(gpu_name: str) -> Table:
    """Table of this GPU (`torch.cuda.get_device_name()`), or the fallback's if none is committed.

    Raises ValueError for a table that can't be: unknown fields, or see `Table`.
    """
    if gpu_name not in _tables:
        path = table_path(gpu_name)
        path = path if path.exists() else table_path(FALLBACK)
        data = json.loads(path.read_text())
        try:
            entries = tuple(Entry(**entry) for entry in data["entries"])
            choices = tuple(Choice(**choice) for choice in data["choices"])
        except TypeError as error:
            raise ValueError(f"{path} has a field that tables don't have: {error}") from None
        _tables[gpu_name] = Table(data["gpu"], data["note"], entries, choices)
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
