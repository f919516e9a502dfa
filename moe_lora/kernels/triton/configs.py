# SPDX-License-Identifier: Apache-2.0
"""Which meta-parameters each kernel is launched with: committed tables, and an override.

A table is a JSON file `configs/<gpu name>.json`. Its entries are keyed by kernel, dtype, phase and the widths
of the site. What fixes the order in which a row is accumulated (the algorithm, and `ORDER_FIXING`)
must not depend on the phase, as a decode row has a prefill chunk beside it in one step and none in the next:
a table that breaks this is refused. Only tiles of tokens, stages and grids may differ by phase.
`state` of an entry says whether it was `tuned` on that GPU or is a `default`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe_lora.core.shape import MAX_CUDA_LORA_RANK

# The meta-parameters of each kernel and the values of them worth trying.


Config = dict[str, Any]

SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "wgmma_shrink": {
        "block_t": (16, 32, 64),
        "block_k": (64, 128, 256),
        "split_k": (1, 2, 4, 8),
        "part_k": (512, 1024, 2048),
        "tma": (False, True),
        "num_stages": (3, 4, 6),
        "num_warps": (4,),
        "programs_per_sm": (1, 2, 3, 4, 6),
    },
    "wgmma_expand": {
        "block_t": (16, 32, 64),
        "block_c": (64, 128),
        "blocks_per_item": (1, 2, 4, 8),
        "tma": (False, True),
        "num_stages": (2, 3, 4),
        "num_warps": (4,),
        "programs_per_sm": (1, 2, 3, 4, 6),
    },
    "vector_shrink": {
        "block_r": (4, 8, 16),
        "block_k": (256, 512, 1024),
        "split_k": (1, 2, 4),
        "num_stages": (1, 2, 4),
        "num_warps": (4, 8),
        "programs_per_sm": (2, 4, 8),
    },
    "vector_expand": {
        "block_r": (16, 32),
        "block_c": (64, 128, 256),
        "num_stages": (1, 2, 4),
        "num_warps": (4, 8),
        "programs_per_sm": (2, 4, 8),
    },
}
"""Per kernel and meta-parameter the values worth trying. `block_t`: tokens of a tile (wgmma's N); `block_r`:
rank rows; `block_k`: input columns a step; `split_k`: parts of the input width that are summed apart, at
most, and `part_k`: columns that each has at least; `tma`: whether weights come by TMA, or by pointer;
`block_c`: output columns; `blocks_per_item`: blocks of them that one work item covers;
`programs_per_sm`: programs of the persistent grid on each SM."""
KERNEL_NAMES = tuple(SPACES)
ORDER_FIXING: dict[str, tuple[str, ...]] = {
    "wgmma_shrink": ("block_k", "split_k", "part_k"),
    "wgmma_expand": (),
    "vector_shrink": ("block_r", "block_k", "split_k", "num_warps"),
    "vector_expand": ("block_r", "block_c", "num_warps"),
}
"""Meta-parameters that change the order in which a row's products are added, so that they must not depend on
the phase. Tensor cores add along the inner width whatever the tile of tokens; where threads add, the layout
of the whole tile decides."""
_MAX_SHARED_BYTES = 200 * 1024


def check_config(kernel: str, config: Config) -> None:
    """Raises ValueError if the kernel is unknown or a meta-parameter is missing, unknown or not a size."""
    if kernel not in SPACES:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNEL_NAMES)}")
    if set(config) != set(SPACES[kernel]):
        raise ValueError(f"{kernel} takes {sorted(SPACES[kernel])}, the config has {sorted(config)}")
    for name, value in config.items():
        if int(value) != value or (value < 1 and name != "tma"):
            raise ValueError(f"{name}={value!r} of {kernel} must be a positive integer")


def config_space(kernel: str) -> list[Config]:
    """Every configuration of the kernel worth trying, those left out that can't fit in shared memory."""
    if kernel not in SPACES:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNEL_NAMES)}")
    names = list(SPACES[kernel])
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*SPACES[kernel].values())]
    return [config for config in every if _staged_bytes(kernel, config) <= _MAX_SHARED_BYTES]


def order_of(kernel: str, config: Config) -> tuple[Any, ...]:
    """The values of the configuration that fix the order of sums."""
    return tuple(config[name] for name in ORDER_FIXING[kernel])


def _staged_bytes(kernel: str, config: Config) -> int:
    """Bytes that the stages of a two-byte dtype's operand tiles take per SM (0 where tiles are registers)."""
    if kernel.startswith("vector"):
        return 0
    stages, tokens = config["num_stages"], config["block_t"]
    if kernel == "wgmma_shrink":
        per_program = stages * (64 + tokens) * config["block_k"]
    else:  # h as two numbers, once
        per_program = 64 * (stages * config["block_c"] + 2 * tokens)
    return 2 * per_program * config["programs_per_sm"]


FALLBACK = "default"
DTYPES = ("bf16", "fp16", "fp32")
PHASES = ("decode", "prefill")
CONFIG_DIR = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
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

    It has no phase: the algorithm fixes the order of sums.
    """

    algorithm: str
    min_rank: int = 1
    max_rank: int = MAX_CUDA_LORA_RANK
    dtype: str | None = None
    in_features: int | None = None
    out_features: int | None = None
    state: str = "default"


@dataclass(frozen=True)
class ConfigTable:
    """Launch configurations and algorithm choices of one GPU; of several matches the first counts.

    dependent_launch: kernels of `DEPENDENT` begin while the kernel before them ends (CUDA's programmatic
    dependent launch, from sm_90 on).
    Raises ValueError if the phases of one place have configurations that add a row in different orders.
    """

    gpu: str
    note: str
    entries: tuple[ConfigEntry, ...]
    choices: tuple[Choice, ...] = field(default=())
    dependent_launch: bool = False

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
_tables: dict[str, ConfigTable] = {}


def matches(have: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Whether each field that is not None equals the wanted one."""
    return all(h is None or h == w for h, w in zip(have, wanted, strict=True))


def _first_fit(entries: Iterable[ConfigEntry], wanted: tuple[Any, ...]) -> ConfigEntry | None:
    for entry in entries:
        if matches((entry.dtype, entry.phase, entry.in_features, entry.out_features), wanted):
            return entry
    return None


def load_table(gpu_name: str) -> ConfigTable:
    """Table of this GPU (`torch.cuda.get_device_name()`), or the fallback's if none is committed.

    Raises ValueError for a table that can't be: unknown fields, or see `ConfigTable`.
    """
    if gpu_name not in _tables:
        path = table_path(gpu_name)
        path = path if path.exists() else table_path(FALLBACK)
        data = json.loads(path.read_text())
        try:
            entries = tuple(ConfigEntry(**entry) for entry in data["entries"])
            choices = tuple(Choice(**choice) for choice in data["choices"])
        except TypeError as error:
            raise ValueError(f"{path} has a field that tables don't have: {error}") from None
        dependent = data.get("dependent_launch", False)
        _tables[gpu_name] = ConfigTable(data["gpu"], data["note"], entries, choices, dependent)
    return _tables[gpu_name]


def save_table(table: ConfigTable, path: Path | None = None) -> Path:
    """Write the table to `path`, or to where `load_table` finds it; returns the path."""
    path = path or table_path(table.gpu)
    data = {
        "gpu": table.gpu,
        "note": table.note,
        "dependent_launch": table.dependent_launch,
        "choices": [_given(choice) for choice in table.choices],
        "entries": [_given(entry) for entry in table.entries],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    _tables.pop(table.gpu, None)
    return path


def table_path(gpu_name: str) -> Path:
    """File of this GPU's table; the name's spaces and slashes become underscores."""
    return CONFIG_DIR / f"{gpu_name.replace(' ', '_').replace('/', '_')}.json"


def _given(row: ConfigEntry | Choice) -> dict[str, Any]:
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


# How kernels are launched: on a CUDA device, or on CPU tensors by Triton's interpreter (TRITON_INTERPRET=1).
#
# A launch never waits for the device: grids are bounded by host numbers, and the work that a persistent grid
# shares out is counted in device memory. So launches can be captured into CUDA graphs.


DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INTERPRETED_SMS = 3


def dtype_named(name: str) -> torch.dtype:
    """The other way round."""
    return next(dtype for dtype, known in DTYPE_NAMES.items() if known == name)


def kernels(name: str) -> ModuleType:
    """The module `name` of this package that holds Triton kernels. Raises ImportError without Triton."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError("kernels on a GPU need Triton; install it with: pip install triton") from error


def interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=16)
def _device_facts(device: torch.device) -> tuple[str, int]:
    """Name and number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count


def table_of(device: torch.device) -> ConfigTable:
    """Configuration table of this device."""
    return load_table(FALLBACK if device.type == "cpu" else _device_facts(device)[0])


def programs_at_once(device: torch.device, per_sm: int) -> int:
    """What the device holds, of a kernel of which so many programs fit an SM."""
    return per_sm * (_INTERPRETED_SMS if device.type == "cpu" else _device_facts(device)[1])


def num_programs(device: torch.device, config: Config, max_items: int) -> int:
    """Programs of a persistent grid: what the device holds at once, or fewer if there is less work."""
    return max(1, min(programs_at_once(device, config["programs_per_sm"]), max_items))


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


DEPENDENT = frozenset(
    {
        "wgmma_site.wgmma_site",
        "expert_kernels.choose_and_order",
        "expert_kernels.expert_linear",
        "kv_kernels.write_kv",
        "attention_kernels.attend",
        "attention_kernels.join_parts",
    }
)
"""Kernels of a decode step, by module, that can wait for the one before them before they do anything else."""


def when_it_begins(kernel: Any, early: bool) -> dict[str, bool]:
    """A kernel's constants and compile options that say so; none of one that always begins last."""
    if f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}" not in DEPENDENT:
        return {}
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False}


def start(kernel: Any, programs: int, *operands: Any, **meta: Any) -> None:
    """Launch `programs` programs of a Triton kernel on the device that its tensors lie on.

    meta holds its constants and compile options.
    """
    import triton

    if interpreted():
        meta = {name: value for name, value in meta.items() if name not in ("num_warps", "num_stages")}
        kernel[(programs,)](*operands, **meta, **when_it_begins(kernel, False))
        return
    # The first may lie in page-locked memory of the host.
    tensors = (one for one in operands if isinstance(one, torch.Tensor))
    device = next((one.device for one in tensors if one.is_cuda), operands[0].device)
    meta |= when_it_begins(kernel, table_of(device).dependent_launch)
    with torch.cuda.device(device):
        # Descriptors made on the device need memory of their own; torch's allocator follows graph capture.
        triton.set_allocator(_scratch)
        kernel[(programs,)](*operands, **meta)
