# SPDX-License-Identifier: Apache-2.0
"""Operands of one LoRA benchmark case: a batch's routing, its adapters, and cold copies.

Legend: T token rows, K experts per token (1 at a dense site), M = T*K output rows, H input width, N output
width, P touched (adapter, expert) pairs, R LoRA rank.

Memory holds only the batch's pairs; a copy of them is a layer of the slot table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from moe_lora.core.shape import MATRIX_ALIGN_BYTES
from moe_lora.kernels import reference
from moe_lora.kernels.cpu.library import advise_huge_pages
from moe_lora.kernels.operands import LoraOperands, SlotTable

from .lora_kernel_plan import CaseSpec

ZIPF_S = 1.2
MAX_COPIES = 256
_BLOCK_ELEMENTS = 4_000_037  # no multiple of a row, so that matrices made of repeated blocks differ
_H_BYTES = 4  # the values between the phases are fp32


@dataclass(frozen=True)
class Routing:
    """Requests of a batch.  token_slots: [T] int32.  ids: [T, K] int32 ascending in a row, or None.

    pairs: [P, 2] touched (slot, expert), sorted.  pair_of_row: [M] int64.
    """

    token_slots: torch.Tensor
    ids: torch.Tensor | None
    pairs: torch.Tensor
    pair_of_row: torch.Tensor


@lru_cache(maxsize=2)
def routing(spec: CaseSpec) -> Routing:
    """The batch of this case, the same in every run."""
    generator = torch.Generator().manual_seed(19)
    turn = torch.arange(spec.num_rows)
    if spec.popularity == "zipf":
        weights = torch.arange(1, spec.num_adapters + 1, dtype=torch.float64) ** -ZIPF_S
        token_slots = torch.multinomial(weights, spec.num_rows, replacement=True, generator=generator)
    elif spec.popularity == "uniform":
        token_slots = turn % spec.num_adapters
    else:
        token_slots = turn * spec.num_adapters // spec.num_rows
    ids, expert, slot = None, torch.zeros_like(token_slots), token_slots
    if spec.shape.top_k:
        draws = torch.rand(spec.num_rows, spec.shape.site.num_experts, generator=generator)
        ids = draws.topk(spec.shape.top_k).indices.sort(1).values
        expert, slot = ids.reshape(-1), token_slots.repeat_interleave(spec.shape.top_k)
    pairs, pair_of_row = torch.stack([slot, expert], 1).unique(dim=0, return_inverse=True)
    return Routing(token_slots.int(), None if ids is None else ids.int(), pairs, pair_of_row)


def lora_ranks(spec: CaseSpec) -> torch.Tensor:
    """Rank of each adapter, [num_adapters]: the case's ranks in turn, shuffled against popularity."""
    order = torch.randperm(spec.num_adapters, generator=torch.Generator().manual_seed(7))
    return torch.tensor(spec.lora_ranks)[order % len(spec.lora_ranks)]


@dataclass(frozen=True)
class Work:
    """Bytes to move and floating-point operations, by phase; bytes of memory of one copy."""

    bytes: dict[str, int]
    flops: dict[str, int]
    copy_bytes: int
    matrix_bytes: dict[str, int]
    padded_bytes: int


def work(spec: CaseSpec) -> Work:
    """Each touched matrix once, x once, y read and written; a single phase also moves h.

    h has `R` fp32 values per output row and module, at the row's true rank.
    """
    route, ranks, site = routing(spec), lora_ranks(spec), spec.shape.site
    size, modules = spec.dtype.itemsize, len(site.modules)
    ranks_P = ranks[route.pairs[:, 0]]
    pair_ranks, row_ranks = int(ranks_P.sum()), int(ranks_P[route.pair_of_row].sum())
    a, b = pair_ranks * modules * site.in_features * size, pair_ranks * site.total_out_features * size
    x = num_input_rows(spec) * site.in_features * size
    y = route.pair_of_row.numel() * site.total_out_features * size
    between = row_ranks * modules * _H_BYTES
    shrink_flops = 2 * row_ranks * modules * site.in_features
    expand_flops = 2 * row_ranks * site.total_out_features
    padded_ranks = len(route.pairs) * max(spec.lora_ranks)
    return Work(
        bytes={"shrink": a + x + between, "expand": b + between + 2 * y, "delta": a + b + x + 2 * y},
        flops={"shrink": shrink_flops, "expand": expand_flops, "delta": shrink_flops + expand_flops},
        copy_bytes=_copy_layout(spec)[2] + x + y,
        matrix_bytes={"shrink": a, "expand": b, "delta": a + b},
        padded_bytes=padded_ranks * (modules * site.in_features + site.total_out_features) * size,
    )


def num_input_rows(spec: CaseSpec) -> int:
    """Rows of x: one per token, or one per token and expert for a site after experts (down)."""
    return spec.num_rows * (spec.shape.top_k if spec.shape.top_k and spec.shape.site.name == "down" else 1)


def num_copies(spec: CaseSpec, cold_bytes: int) -> int:
    """Copies to cycle through: `cold_bytes` of matrices lie between two uses of one."""
    found = work(spec).matrix_bytes
    return min(MAX_COPIES, max(2, math.ceil(cold_bytes / min(found[phase] for phase in spec.phases))))


def memory_bytes(spec: CaseSpec, cold_bytes: int) -> int:
    """Memory of a case: all copies, and padded copies for peers."""
    found = work(spec)
    return num_copies(spec, cold_bytes) * (found.copy_bytes + found.padded_bytes)


def _copy_layout(spec: CaseSpec) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Byte offsets of A and B, [P, modules] each, within a copy, and the copy's bytes."""
    site, size = spec.shape.site, spec.dtype.itemsize
    ranks_P = lora_ranks(spec)[routing(spec).pairs[:, 0]]
    widths = [site.in_features] * len(site.modules) + list(site.out_features)
    bytes_PX = ranks_P[:, None] * torch.tensor(widths) * size
    bytes_PX = -(-bytes_PX // MATRIX_ALIGN_BYTES) * MATRIX_ALIGN_BYTES
    ends = bytes_PX.flatten().cumsum(0)
    starts = (ends - bytes_PX.flatten()).view_as(bytes_PX)
    return starts[:, : len(site.modules)], starts[:, len(site.modules) :], int(ends[-1])


class Case:
    """The operands on a device.  `x[copy]`, `y[copy]` and layer `copy` of `slots` belong together.

    x: [T, H] or [M, H] each.  y: [M, N] each; kernels add to it.  arena: bytes.  ids, token_slots, slots: for
    the kernels.  order: [M] output rows by pair; source: [M] row of x for each of them; ends: [P] int32, end
    of each pair's rows in that order; pairs: (slot, expert); lora_rank, scale: per pair.
    """

    def __init__(self, spec: CaseSpec, device: torch.device, cold_bytes: int) -> None:
        self.spec, self.site, self.device = spec, spec.shape.site, device
        self.work, self.num_copies = work(spec), num_copies(spec, cold_bytes)
        route = routing(spec)
        self.token_slots = route.token_slots.to(device)
        self.ids = None if route.ids is None else route.ids.to(device)
        self.pairs: list[tuple[int, int]] = [(slot, expert) for slot, expert in route.pairs.tolist()]
        self.pair_of_row = route.pair_of_row.to(device)
        self.order = route.pair_of_row.argsort(stable=True).to(device)
        self.ends = route.pair_of_row.bincount().cumsum(0).int().to(device)
        num_outputs = route.pair_of_row.numel()
        per_input = num_outputs // num_input_rows(spec)
        self.source = self.order // per_input
        ranks = lora_ranks(spec)
        self.lora_rank: list[int] = ranks[route.pairs[:, 0]].tolist()
        self.scale: list[float] = [_scale(slot) for slot, _ in self.pairs]
        self.max_lora_rank = max(self.lora_rank)
        self._fill_memory(num_outputs)
        self._fill_slots(ranks)

    def operands(self, copy: int) -> LoraOperands:
        """Operands of our kernels."""
        return LoraOperands(self.x[copy], self.ids, self.site, copy, self.token_slots, self.slots, self.arena)

    def _fill_memory(self, num_outputs: int) -> None:
        """Matrices with values of variance 1 / H, x with variance 1, y of zeros."""
        spec, site = self.spec, self.site
        self._copy_bytes = _copy_layout(spec)[2]
        self.arena = torch.empty(self._copy_bytes * self.num_copies, dtype=torch.uint8, device=self.device)
        advise_huge_pages(self.arena)
        generator = torch.Generator(self.device).manual_seed(1)
        values = self.arena.view(spec.dtype)
        block = torch.randn(min(_BLOCK_ELEMENTS, values.numel()), generator=generator, device=self.device)
        block = block.mul_(site.in_features**-0.5).to(spec.dtype)
        for start in range(0, values.numel(), block.numel()):
            part = values[start : start + block.numel()]
            part.copy_(block[: part.numel()])
        size = (num_input_rows(spec), site.in_features)
        self.x = [
            torch.randn(size, generator=generator, device=self.device).to(spec.dtype)
            for _ in range(self.num_copies)
        ]
        self.y = [
            torch.zeros(num_outputs, site.total_out_features, dtype=spec.dtype, device=self.device)
            for _ in range(self.num_copies)
        ]

    def _fill_slots(self, ranks: torch.Tensor) -> None:
        site, num_adapters = self.site, self.spec.num_adapters
        a_offset, b_offset, copy_bytes = _copy_layout(self.spec)
        table = SlotTable(num_adapters, self.num_copies, site.num_entries, torch.device("cpu"))
        table.scale[:] = torch.tensor([_scale(slot) for slot in range(num_adapters)])[:, None, None]
        pairs = torch.tensor(self.pairs)
        for module in range(len(site.modules)):
            entry = pairs[:, 1] * len(site.modules) + module
            for copy in range(self.num_copies):
                table.lora_rank[pairs[:, 0], copy, entry] = ranks[pairs[:, 0]].int()
                table.a_offset[pairs[:, 0], copy, entry] = a_offset[:, module] + copy * copy_bytes
                table.b_offset[pairs[:, 0], copy, entry] = b_offset[:, module] + copy * copy_bytes
        table.ranks[:] = ranks[:, None]
        for name in ("a_offset", "b_offset", "lora_rank", "scale"):
            setattr(table, name, getattr(table, name).to(self.device))
        self.slots = table
        self._offsets = (a_offset.tolist(), b_offset.tolist())

    def a(self, copy: int, pair: int, module: int) -> torch.Tensor:
        """A of a pair's module, [R, H]."""
        return self._matrix(self._offsets[0][pair][module], copy, pair, self.site.in_features)

    def b(self, copy: int, pair: int, module: int) -> torch.Tensor:
        """B transposed, [R, N]."""
        return self._matrix(self._offsets[1][pair][module], copy, pair, self.site.out_features[module])

    def _matrix(self, offset: int, copy: int, pair: int, width: int) -> torch.Tensor:
        start = offset + copy * self._copy_bytes
        return reference.arena_rows(self.arena, start, self.lora_rank[pair], width, self.spec.dtype)

    @cached_property
    def padded(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """[copy][module] -> A [P, R, H] and B [P, R, N], zeros above each pair's rank up to the largest."""
        return [
            [(self._pad(self.a, copy, m), self._pad(self.b, copy, m)) for m in range(len(self.site.modules))]
            for copy in range(self.num_copies)
        ]

    def _pad(self, matrix, copy: int, module: int) -> torch.Tensor:
        width = matrix(copy, 0, module).shape[1]
        out = torch.zeros(
            len(self.pairs), self.max_lora_rank, width, dtype=self.spec.dtype, device=self.device
        )
        for pair, lora_rank in enumerate(self.lora_rank):
            out[pair, :lora_rank] = matrix(copy, pair, module)
        return out

    @cached_property
    def exact(self) -> torch.Tensor:
        """The delta of copy 0 in fp32, [M, N]: `reference.lora_delta` unrounded, without waits on a GPU."""
        out = torch.zeros(len(self.order), self.site.total_out_features, device=self.device)
        for pair, rows in enumerate(self.segments):
            segment = self.x[0][self.source[rows]].float()
            for module, (column, width) in enumerate(
                zip(self.site.columns, self.site.out_features, strict=True)
            ):
                h = segment @ self.a(0, pair, module).float().T
                out[self.order[rows], column : column + width] = (
                    h @ self.b(0, pair, module).float() * self.scale[pair]
                )
        return out

    @cached_property
    def segments(self) -> list[slice]:
        """Each pair's rows in `order` and `source`."""
        ends = self.ends.tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _scale(slot: int) -> float:
    return 1.0 + slot % 3 / 2
