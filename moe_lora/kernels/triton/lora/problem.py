# SPDX-License-Identifier: Apache-2.0
"""A site's LoRA operands, checked before a launch.

Legend: T tokens, K experts per token, R rows (T, or T*K at an expert site), C output columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_lora.core.shape import MATRIX_ALIGN_BYTES
from moe_lora.kernels.operands import LoraOperands, SlotTable
from moe_lora.kernels.triton import configs

from . import segments

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

_MAX_MODULES = 3


class Tables(NamedTuple):
    """The slot table's columns and the arena."""

    a_offset: torch.Tensor
    b_offset: torch.Tensor
    lora_rank: torch.Tensor
    scale: torch.Tensor
    arena: torch.Tensor


class Deltas(NamedTuple):
    """Deltas for a fused addition: values [R, C], undefined at rank 0."""

    values: torch.Tensor
    token_slots: torch.Tensor
    lora_rank: torch.Tensor
    slot_stride: int
    table_base: int

    def from_expert(self, first: int) -> Deltas:
        """The deltas for a base layer with first expert `first`."""
        return self._replace(table_base=self.table_base + 2 * first)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Shared operands of a site's kernels."""

    x: torch.Tensor
    site: Site
    layer: int
    token_slots: torch.Tensor
    slots: SlotTable
    arena: torch.Tensor
    segments: segments.Segments
    decode: bool
    max_lora_rank: int
    """Largest possible rank."""
    padded_rank: int = 0
    """Rank of every row in "bgmv"."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.segments.rows.numel()

    @property
    def rows_per_input(self) -> int:
        """Output rows per row of x."""
        return self.num_rows // max(1, self.x.shape[0])

    @property
    def modules(self) -> int:
        return len(self.site.modules)

    @property
    def out_widths(self) -> tuple[int, ...]:
        """Widths of three modules, 0 if absent."""
        return (*self.site.out_features, *[0] * (_MAX_MODULES - self.modules))

    @property
    def h_width(self) -> int:
        """Columns of the workspace: the largest rank, rounded up to a tile."""
        return -(-self.max_lora_rank // 64) * 64

    @property
    def tables(self) -> Tables:
        slots = self.slots
        return Tables(slots.a_offset, slots.b_offset, slots.lora_rank, slots.scale, self.arena)

    @property
    def entry_strides(self) -> tuple[int, int]:
        """slot_stride and table_base of `entries`."""
        _, layers, entries = self.slots.lora_rank.shape
        return layers * entries, self.layer * entries + self.site.entry_base

    def batch_rank(self) -> int:
        """Largest rank in this batch; waits for the device."""
        slot, expert = self.segments.described[:, 2].long(), self.segments.described[:, 3].long()
        chosen = slot >= 0
        slot_stride, table_base = self.entry_strides
        first = slot[chosen] * slot_stride + table_base + expert[chosen] * self.modules
        entries = first[:, None] + torch.arange(self.modules, device=first.device)
        ranks = self.slots.lora_rank.flatten()[entries]
        return int(ranks.max()) if ranks.numel() else 0

    def config(self, kernel: str) -> dict[str, Any]:
        return config_of(kernel, self.x, self.site, self.decode)


def config_of(kernel: str, x: torch.Tensor, site: Site, decode: bool) -> dict[str, Any]:
    """Launch configuration of a kernel at a site."""
    dtype, phase = configs.DTYPE_NAMES[x.dtype], "decode" if decode else "prefill"
    widths = (site.in_features, sum(site.out_features))
    return configs.table_of(x.device).config(kernel, dtype, phase, *widths)


def checked_problem(
    operands: LoraOperands,
    *,
    decode: bool,
    rows: segments.Segments,
    max_lora_rank: int | None,
    batch_rank: int | None,
) -> Problem:
    """The operands as a `Problem`.  rows: `segments.rows_for` of these.

    max_lora_rank: of all slots; batch_rank: of this batch, unchecked; default: the table's.  Raises
    ValueError for bad operands.
    """
    x, ids, site, layer, token_slots, slots, arena = operands
    if x.device.type != "cuda" and not configs.interpreted():
        raise ValueError(f"x lies on {x.device}; these kernels take CUDA tensors")
    if x.dtype not in configs.DTYPE_NAMES:
        raise ValueError(f"x is {x.dtype}; it must be bfloat16, float16 or float32")
    if x.dim() != 2 or x.shape[1] != site.in_features or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} with strides {x.stride()}; site {site.name!r} takes rows of "
            f"{site.in_features} contiguous elements"
        )
    segments.check_rows_and_ids(token_slots, ids)
    if (ids is None) != (site.num_experts == 0):
        raise ValueError(
            f"site {site.name!r} has {site.num_experts} experts; give ids if and only if it has any"
        )
    num_rows = token_slots.numel() if ids is None else ids.numel()
    if x.shape[0] not in (token_slots.numel(), num_rows):
        raise ValueError(
            f"x has {x.shape[0]} rows; {token_slots.numel()} tokens need that many or {num_rows}"
        )
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        raise ValueError(f"arena is {tuple(arena.shape)} {arena.dtype}; it must be flat contiguous uint8")
    if arena.data_ptr() % MATRIX_ALIGN_BYTES:
        raise ValueError(
            f"arena begins at {arena.data_ptr():#x}; it must be a multiple of {MATRIX_ALIGN_BYTES} bytes"
        )
    if arena.numel() < slots.end_bytes:
        raise ValueError(
            f"arena has {arena.numel()} bytes, matrices of the slot table end at {slots.end_bytes}"
        )
    devices = {tensor.device for tensor in (x, token_slots, arena, slots.lora_rank)}
    if len(devices) > 1:
        raise ValueError(f"x, token_slots, arena and slots lie on {devices}; they must be on one device")
    if not 0 <= layer < slots.lora_rank.shape[1]:
        raise ValueError(f"layer={layer} is outside the slot table's {slots.lora_rank.shape[1]} layers")
    if len(site.modules) > _MAX_MODULES:
        raise ValueError(f"site {site.name!r} has {len(site.modules)} modules; kernels take {_MAX_MODULES}")
    if rows.rows.numel() != num_rows:
        raise ValueError(f"segments have {rows.rows.numel()} rows, this batch has {num_rows}")
    if max_lora_rank is not None and (largest := slots.largest_rank(site)) > max_lora_rank:
        raise ValueError(
            f"an adapter at site {site.name!r} has rank {largest}, max_lora_rank is {max_lora_rank}; raise it"
        )
    bounds = (max_lora_rank, batch_rank)
    bound = next((one for one in bounds if one is not None), None)
    return Problem(
        x=x,
        site=site,
        layer=layer,
        token_slots=token_slots,
        slots=slots,
        arena=arena,
        segments=rows,
        decode=decode,
        max_lora_rank=slots.largest_rank(site) if bound is None else bound,
    )


def check_output(y: torch.Tensor, problem: Problem, name: str, *, or_fp32: bool = False) -> None:
    """Raise ValueError unless y has the site's rows and columns, and x's dtype (or fp32) and device."""
    width = sum(problem.site.out_features)
    dtypes = (problem.x.dtype, torch.float32) if or_fp32 else (problem.x.dtype,)
    if y.dtype not in dtypes or y.device != problem.x.device:
        raise ValueError(f"{name} is {y.dtype} on {y.device}, x is {problem.x.dtype} on {problem.x.device}")
    if y.dim() != 2 or y.shape[0] != problem.num_rows or y.shape[1] < width or y.stride(1) != 1:
        raise ValueError(
            f"{name} is {tuple(y.shape)} with strides {y.stride()}; site {problem.site.name!r} needs "
            f"{problem.num_rows} rows of at least {width} contiguous elements"
        )
