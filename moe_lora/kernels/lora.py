# SPDX-License-Identifier: Apache-2.0
"""The LoRA kernels of a device: CPU library, Triton on CUDA, else the reference.

Legend and kernels: see `cpu.cpu`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Union

import torch

from . import reference
from .cpu import cpu
from .operands import LoraOperands

if TYPE_CHECKING:
    from moe_lora.kernels.operands import Zeros
    from moe_lora.kernels.triton.lora.problem import Deltas
    from moe_lora.kernels.triton.lora.segments import RowsToSort, Segments
    from moe_lora.kernels.triton.lora.triton_lora import Shrunk as GpuShrunk

Shrunk = Union[cpu.CpuShrunk, "GpuShrunk", torch.Tensor]
"""Result of `lora_shrink`; a tensor is the whole delta."""
_DENSE = -1


class SharedSegments:
    """Rows in the order of `kernel`, made once per step (CUDA only).

    Dense sites with equal token_slots share an order, expert sites of a layer with equal ids another.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor, Segments]] = {}

    @cached_property
    def zeros(self) -> Zeros:
        from moe_lora.kernels.operands import Zeros

        return Zeros()

    def of(self, operands: LoraOperands, kernel: str, decode: bool = False) -> Segments:
        """`segments.rows_for` of these rows; keeps the tensors: identities stay unique."""
        from moe_lora.kernels.triton.lora.segments import rows_for
        from moe_lora.kernels.triton.lora.steps import tile_rows

        ids, slots = operands.ids, operands.token_slots
        place = _DENSE if ids is None else operands.layer, id(slots)
        known = self._known.get(place)
        if known is None or known[0] is not ids:
            rows = rows_for(operands, kernel, tile_rows(operands.x, operands.site, decode), self.zeros)
            known = self._known[place] = ids, slots, rows
        return known[2]

    def to_sort(self, operands: LoraOperands, decode: bool) -> RowsToSort:
        """The result of `of` for "sgmv" at an expert site, to be filled by the caller."""
        from moe_lora.kernels.triton.lora.segments import rows_to_sort
        from moe_lora.kernels.triton.lora.steps import tile_rows

        x, ids, site, layer, slots, table, _ = operands
        num_tile_rows = tile_rows(x, site, decode)
        made = rows_to_sort(slots, ids, table.num_slots, site.num_experts, num_tile_rows, self.zeros)
        self._known[layer, id(slots)] = ids, slots, made.segments
        return made


def lora_shrink(
    operands: LoraOperands,
    *,
    kernel: str = "sgmv",
    decode: bool = False,
    shared: SharedSegments | None = None,
    batch_rank: int | None = None,
) -> Shrunk:
    """h = x_row @ A.T of each row with an adapter.

    decode: for tiles and grids on CUDA, never for the result.  batch_rank: largest rank of this batch, if
    known.  Raises ValueError for bad operands.
    """
    x = operands.x
    if x.is_cpu:
        return cpu.lora_shrink(operands, kernel=kernel)
    if x.is_cuda:
        from moe_lora.kernels.triton.lora import triton_lora

        segments = None
        if shared is not None:
            segments = shared.of(operands, kernel, decode)
        return triton_lora.lora_shrink(
            operands, kernel=kernel, decode=decode, segments=segments, batch_rank=batch_rank
        )
    return reference.lora_delta(operands)


def lora_expand(shrunk: Shrunk, y: torch.Tensor, *, subtract: bool = False) -> None:
    """y[row] = round(y[row] + delta), or y[row] - delta.

    y: [T, N] or [T*K, N] in x's dtype; or fp32: kernels then add the unrounded delta, the reference a rounded
    delta.
    """
    if isinstance(shrunk, cpu.CpuShrunk):
        cpu.lora_expand(shrunk, y, subtract=subtract)
    elif isinstance(shrunk, torch.Tensor):
        y.add_(shrunk, alpha=-1 if subtract else 1)
    else:
        from moe_lora.kernels.triton.lora import triton_lora

        triton_lora.lora_expand(shrunk, y, subtract=subtract)


def deltas_of(shrunk: Shrunk) -> Deltas | None:
    """See `triton_lora.deltas_of`; on CUDA."""
    from moe_lora.kernels.triton.lora import triton_lora

    assert isinstance(shrunk, triton_lora.Shrunk), "elsewhere a site is one operation"
    return triton_lora.deltas_of(shrunk)


def lora_delta(
    operands: LoraOperands, out: torch.Tensor, *, kernel: str = "sgmv", max_lora_rank: int | None = None
) -> None:
    """out = delta of each row, zero without an adapter.

    max_lora_rank: largest in replays of a CUDA graph; None: of current slots.  out: [T, N] or [T*K, N] in x's
    dtype; y + out has the bits of shrink and expand.
    """
    x = operands.x
    if x.is_cpu:
        cpu.lora_delta(operands, out, kernel=kernel)
    elif x.is_cuda:
        from moe_lora.kernels.triton.lora import triton_lora

        triton_lora.lora_delta(operands, out, kernel=kernel, decode=False, max_lora_rank=max_lora_rank)
    else:
        out.copy_(reference.lora_delta(operands))
