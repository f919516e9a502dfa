"""Our own kernels as contestants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .lora_kernel_cases import Case
from .lora_kernel_peers import Contestant, Phases, both


def own_kernels(device: torch.device) -> list[Contestant]:
    """What our library offers on this device: the kernel held against the goals first, then the baselines."""
    if device.type == "cpu":
        return [
            Contestant(f"our {name}", "ours" if name == "sgmv" else "baseline", _prepare_cpu(name))
            for name in ("sgmv", "mbgmv", "bgmv")
        ]
    return []


def _prepare_cpu(kernel: str) -> Callable[[Case], Phases]:
    from moe_lora.kernels import cpu

    def prepare(case: Case) -> Phases:
        return _phases(case, cpu, {"kernel": kernel})

    return prepare


def _phases(case: Case, library: Any, options: dict[str, Any]) -> Phases:
    shrunk: list[Any] = [None] * case.num_copies
    arguments = (case.row_slot, case.slots, case.arena)

    def shrink(copy: int) -> None:
        shrunk[copy] = library.lora_shrink(case.x[copy], case.ids, case.site, copy, *arguments, **options)

    def expand(copy: int) -> None:
        library.lora_expand(shrunk[copy], case.y[copy])

    return both(shrink, expand)
