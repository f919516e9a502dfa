# SPDX-License-Identifier: Apache-2.0
"""Meta-parameters of launches: tables `configs/<gpu name>.json`, and an override.

Parameters that fix a row's order of sums must not depend on the phase: a step mixes decode rows and prefill
chunks.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe_lora.core.shape import MAX_CUDA_LORA_RANK

Config = dict[str, Any]

_COMMON = ("num_stages", "num_warps", "programs_per_sm")
PARAMETERS: dict[str, tuple[str, ...]] = {
    "wgmma_shrink": ("block_t", "block_k", "split_k", "part_k", "tma", *_COMMON),
    "wgmma_expand": ("block_t", "block_c", "blocks_per_item", "tma", *_COMMON),
    "vector_shrink": ("block_r", "block_k", "split_k", *_COMMON),
    "vector_expand": ("block_r", "block_c", *_COMMON),
}
"""Meta-parameters by kernel.  `block_t`: tokens of a tile; `block_r`: rank rows; `block_k`: input columns per
step; `split_k`: most separate sums; `part_k`: least columns of a sum; `tma`: weights by TMA; `block_c`:
output columns; `blocks_per_item`: column blocks.
"""
KERNEL_NAMES = tuple(PARAMETERS)
ORDER_FIXING: dict[str, tuple[str, ...]] = {
    "wgmma_shrink": ("block_k", "split_k", "part_k"),
    "wgmma_expand": (),
    "vector_shrink": ("block_r", "block_k", "split_k", "num_warps"),
    "vector_expand": ("block_r", "block_c", "num_warps"),
}
"""Meta-parameters that change a row's order of sums.  Tensor cores add alike for any token tile; for threads
the whole layout decides.
"""


def check_config(kernel: str, config: Config) -> None:
    """Raise ValueError for an unknown kernel, and a missing or impossible meta-parameter."""
    if kernel not in PARAMETERS:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNEL_NAMES)}")
    if set(config) != set(PARAMETERS[kernel]):
        raise ValueError(f"{kernel} takes {sorted(PARAMETERS[kernel])}, the config has {sorted(config)}")
    for name, value in config.items():
        if int(value) != value or (value < 1 and name != "tma"):
            raise ValueError(f"{name}={value!r} of {kernel} must be a positive integer")


def order_of(kernel: str, config: Config) -> tuple[Any, ...]:
    """The values that fix the order of sums."""
    return tuple(config[name] for name in ORDER_FIXING[kernel])


FALLBACK = "default"
DTYPES = ("bf16", "fp16", "fp32")
PHASES = ("decode", "prefill")
CONFIG_DIR = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """`config` of `kernel` for a matching key (None matches any)."""

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
    """`algorithm` for ranks min_rank..max_rank and a matching key."""

    algorithm: str
    min_rank: int = 1
    max_rank: int = MAX_CUDA_LORA_RANK
    dtype: str | None = None
    in_features: int | None = None
    out_features: int | None = None
    state: str = "default"


@dataclass(frozen=True)
class ConfigTable:
    """Launch configurations and algorithm choices of a GPU; the first match counts.

    Raises ValueError if phases add a row in different orders.
    """

    gpu: str
    note: str
    entries: tuple[ConfigEntry, ...]
    choices: tuple[Choice, ...] = field(default=())
    dependent_launch: bool = False
    """Kernels of `DEPENDENT` start while the previous kernel ends (from sm_90 on)."""

    def __post_init__(self) -> None:
        for kernel in KERNEL_NAMES:
            self._check_phases(kernel)

    def _check_phases(self, kernel: str) -> None:
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
        """The configuration: an active override, else the first match."""
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


def matches(have: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """True if each field except None equals the wanted."""
    return all(h is None or h == w for h, w in zip(have, wanted, strict=True))


def _first_fit(entries: Iterable[ConfigEntry], wanted: tuple[Any, ...]) -> ConfigEntry | None:
    for entry in entries:
        if matches((entry.dtype, entry.phase, entry.in_features, entry.out_features), wanted):
            return entry
    return None


@cache
def load_table(gpu_name: str) -> ConfigTable:
    """The table of this GPU, or the fallback.  Raises ValueError for a bad table."""
    path = table_path(gpu_name)
    path = path if path.exists() else table_path(FALLBACK)
    data = json.loads(path.read_text())
    try:
        entries = tuple(ConfigEntry(**entry) for entry in data["entries"])
        choices = tuple(Choice(**choice) for choice in data["choices"])
    except TypeError as error:
        raise ValueError(f"{path} has a field that tables don't have: {error}") from None
    return ConfigTable(data["gpu"], data["note"], entries, choices, data.get("dependent_launch", False))


def table_path(gpu_name: str) -> Path:
    """File of this GPU's table."""
    return CONFIG_DIR / f"{gpu_name.replace(' ', '_').replace('/', '_')}.json"


@contextmanager
def override(kernel: str, config: Config) -> Iterator[None]:
    """Within the context, launch `kernel` with `config`."""
    check_config(kernel, config)
    token = _overrides.set({**_overrides.get(), kernel: config})
    try:
        yield
    finally:
        _overrides.reset(token)


DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INTERPRETED_SMS = 3


def kernels(name: str) -> ModuleType:
    """The named module.  Raises ImportError without Triton."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError("kernels on a GPU need Triton; install it with: pip install triton") from error


def interpreted() -> bool:
    """True if Triton interprets kernels (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=16)
def _device_facts(device: torch.device) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count


def table_of(device: torch.device) -> ConfigTable:
    return load_table(FALLBACK if device.type == "cpu" else _device_facts(device)[0])


def programs_at_once(device: torch.device, per_sm: int) -> int:
    """Programs on the device."""
    return per_sm * (_INTERPRETED_SMS if device.type == "cpu" else _device_facts(device)[1])


def num_programs(device: torch.device, config: Config, max_items: int) -> int:
    """Programs of a persistent grid."""
    return max(1, min(programs_at_once(device, config["programs_per_sm"]), max_items))


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


DEPENDENT = frozenset(
    {
        "linear.expert_kernels.choose_and_order",
        "linear.expert_kernels.expert_linear",
        "attention.kv_kernels.write_kv",
        "attention.attention_kernels.attend",
        "attention.attention_kernels.join_parts",
    }
)
"""Kernels that first wait for the previous kernel."""


def when_it_begins(kernel: Any, early: bool) -> dict[str, bool]:
    """A kernel's options for an early start; empty for further kernels."""
    if f"{kernel.fn.__module__}.{kernel.fn.__name__}".removeprefix(f"{__package__}.") not in DEPENDENT:
        return {}
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False}


OPTIONS = {"enable_fp_fusion": True}
"""Triton 3.10 changes the default, and with it the bits."""


def start(kernel: Any, programs: int, *operands: Any, **meta: Any) -> None:
    """Launch `programs` programs of a kernel.  meta: constants and compile options."""
    import triton

    if interpreted():
        meta = {name: value for name, value in meta.items() if name not in ("num_warps", "num_stages")}
        kernel[(programs,)](*operands, **meta, **when_it_begins(kernel, False))
        return
    tensors = (one for one in operands if isinstance(one, torch.Tensor))
    device = next((one.device for one in tensors if one.is_cuda), operands[0].device)
    meta |= when_it_begins(kernel, table_of(device).dependent_launch)
    with torch.cuda.device(device):
        # Device-made descriptors need memory; torch's allocator follows graph capture.
        triton.set_allocator(_scratch)
        kernel[(programs,)](*operands, **meta, **OPTIONS)
