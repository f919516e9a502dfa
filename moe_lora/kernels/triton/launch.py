"""How kernels are launched: on a CUDA device, or on CPU tensors by Triton's interpreter (TRITON_INTERPRET=1).

A launch never waits for the device: grids are bounded by host numbers, and the work that a persistent grid
shares out is counted in device memory. So launches can be captured into CUDA graphs.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from .configs import FALLBACK, Config, Table, load_table

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INTERPRETED_SMS = 3


def kernels(name: str) -> ModuleType:
    """The module `name` of this package that holds Triton kernels. Raises ImportError without Triton."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError("LoRA kernels on a GPU need Triton; install it with: pip install triton") from error


def interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=16)
def _device_facts(device: torch.device) -> tuple[str, int]:
    """Name and number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count


def table_of(device: torch.device) -> Table:
    """Configuration table of this device."""
    return load_table(FALLBACK if device.type == "cpu" else _device_facts(device)[0])


def num_programs(device: torch.device, config: Config, max_items: int) -> int:
    """Programs of a persistent grid: what the device holds at once, or fewer if there is less work."""
    sms = _INTERPRETED_SMS if device.type == "cpu" else _device_facts(device)[1]
    return max(1, min(sms * config["programs_per_sm"], max_items))


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def start(kernel: Any, programs: int, *operands: Any, **meta: Any) -> None:
    """Launch `programs` programs of a Triton kernel on the device of its first operand, a tensor.

    meta holds its constants and compile options.
    """
    import triton

    if interpreted():
        meta = {name: value for name, value in meta.items() if name not in ("num_warps", "num_stages")}
        kernel[(programs,)](*operands, **meta)
        return
    with torch.cuda.device(operands[0].device):
        # Descriptors made on the device need memory of their own; torch's allocator follows graph capture.
        triton.set_allocator(_scratch)
        kernel[(programs,)](*operands, **meta)
