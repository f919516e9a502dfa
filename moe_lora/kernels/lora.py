"""The LoRA kernels of the device that the operands lie on: CPU library, Triton on CUDA, else the reference.

Legend: T token rows, H input width, N output width, K experts per token.

Three ways to walk a batch, named by `kernel`: "sgmv" (ours, the default: rows of one adapter together, true
rank), and the papers' baselines "bgmv" (Punica: a row at a time, padded to the batch's largest rank) and
"mbgmv" (S-LoRA: a row at a time, true rank); see `cpu_lora` and `gpu.lora`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import torch

from . import cpu, reference
from .step import SlotTable

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

    from .gpu.lora import Shrunk as GpuShrunk

Shrunk = Union[cpu.Shrunk, "GpuShrunk", torch.Tensor]
"""What `lora_shrink` leaves for `lora_expand`; a tensor is the whole delta."""


class SharedSegments:
    """Rows sorted by adapter and expert, made once for the sites that share them (CUDA only).

    A step's dense sites share one order; a layer's expert sites share that of their ids.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}

    def of(self, layer: int, ids: torch.Tensor | None, row_slot: torch.Tensor, site: Site, slots: int) -> Any:
        from .gpu.segments import build_segments

        key = (-1, 0) if ids is None else (layer, ids.data_ptr())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = build_segments(row_slot, ids, slots, site.num_experts)
        return known


def lora_shrink(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    site: Site,
    layer: int,
    row_slot: torch.Tensor,
    slots: SlotTable,
    arena: torch.Tensor,
    *,
    kernel: str = "sgmv",
    decode: bool = False,
    shared: SharedSegments | None = None,
) -> Shrunk:
    """h = x_row @ A.T of each row that has an adapter; operands as in `reference.lora_delta`.

    decode: the phase, which may choose the algorithm on CUDA.  Raises ValueError for operands that don't fit.
    """
    operands = (x, ids, site, layer, row_slot, slots, arena)
    if x.is_cpu:
        return cpu.lora_shrink(*operands, kernel=kernel)
    if x.is_cuda:
        from .gpu import lora

        segments = None
        if shared is not None and kernel == "sgmv":
            segments = shared.of(layer, ids, row_slot, site, slots.num_slots)
        return lora.lora_shrink(*operands, kernel=kernel, decode=decode, segments=segments)
    return reference.lora_delta(*operands)


def lora_expand(shrunk: Shrunk, y: torch.Tensor) -> None:
    """y[row] = round(y[row] + delta).  y: [T, N] or [T*K, N] in the dtype of the shrink's x."""
    if isinstance(shrunk, cpu.Shrunk):
        cpu.lora_expand(shrunk, y)
    elif isinstance(shrunk, torch.Tensor):
        y.add_(shrunk)
    else:
        from .gpu import lora

        lora.lora_expand(shrunk, y)


def lora_delta(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    site: Site,
    layer: int,
    row_slot: torch.Tensor,
    slots: SlotTable,
    arena: torch.Tensor,
    out: torch.Tensor,
    *,
    decode: bool = False,
) -> None:
    """out = delta of each row, zero where it has no adapter; see `reference.lora_delta`.

    out: [T, N] or [T*K, N] in x's dtype, overwritten.
    """
    operands = (x, ids, site, layer, row_slot, slots, arena)
    if x.is_cpu:
        cpu.lora_delta(*operands, out)
    elif x.is_cuda:
        from .gpu import lora

        # Never fused: a delta must have the bits of a shrink and an expand on an instance's own device.
        lora.lora_delta(*operands, out, decode=decode)
    else:
        out.copy_(reference.lora_delta(*operands))
