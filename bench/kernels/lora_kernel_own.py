# SPDX-License-Identifier: Apache-2.0
"""Our own kernels as contestants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_lora.config import LORA_KERNELS

from .lora_kernel_cases import Case
from .lora_kernel_peers import Contestant, NotApplicable, Phases, both

BASELINES = tuple(kernel for kernel in LORA_KERNELS if kernel != "sgmv")
ALGORITHMS = ("wgmma", "vector")


def own_kernels(device: torch.device) -> list[Contestant]:
    """Our kernels on this device: the kernel for the goals, its variants, baselines."""
    if device.type == "cpu":
        from moe_lora.kernels.cpu import cpu

        return _contestants(lambda options: lambda case: _phases(case, cpu, options))
    return [
        *_contestants(gpu_phases),
        *(
            Contestant(f"our {name}", "variant", gpu_phases({"kernel": "sgmv", "algorithm": name}))
            for name in ALGORITHMS
        ),
    ]


def gpu_phases(options: dict[str, Any]) -> Callable[[Case], Phases]:
    """Our Triton kernels; `prepare` makes their work lists, as a layer does once for its sites."""

    def prepare(case: Case) -> Phases:
        from moe_lora.kernels.triton.lora import triton_lora as lora
        from moe_lora.kernels.triton.lora.segments import rows_for

        rows, decode = rows_for(case.operands(0), options["kernel"]), case.spec.group != "prefill"
        found = {
            **options,
            "decode": decode,
            "segments": rows,
            "max_lora_rank": case.max_lora_rank,
            "batch_rank": case.max_lora_rank,
        }
        return _phases(case, lora, found)

    return prepare


def _contestants(prepare: Callable[[dict[str, Any]], Callable[[Case], Phases]]) -> list[Contestant]:
    return [
        Contestant("our sgmv", "ours", prepare({"kernel": "sgmv"})),
        *(Contestant(f"our {name}", "baseline", prepare({"kernel": name})) for name in BASELINES),
    ]


def _phases(case: Case, library: Any, options: dict[str, Any]) -> Phases:
    """The engine's way: a shrink, then an expand that adds to y.

    Raises NotApplicable with the library's own words for a refused case.
    """
    shrunk: list[Any] = [None] * case.num_copies

    def shrink(copy: int) -> None:
        shrunk[copy] = library.lora_shrink(case.operands(copy), **options)

    def expand(copy: int) -> None:
        library.lora_expand(shrunk[copy], case.y[copy])

    try:
        shrink(0)
    except ValueError as reason:
        raise NotApplicable(str(reason)) from None
    return both(shrink, expand)
