# SPDX-License-Identifier: Apache-2.0
"""Random operands for the kernel tests: sites, slot tables with packed adapters, batches, paged sequences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from moe_lora.kernels.operands import KvLayout, SlotTable, StepTables


@dataclass(frozen=True)
class SiteCase:
    """The fields of core.shape.Site that kernels read."""

    name: str
    modules: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    num_experts: int = 0
    entry_base: int = 1

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(accumulate(self.out_features, initial=0))[:-1]

    def entry(self, module: int, expert: int = 0) -> int:
        return self.entry_base + expert * len(self.modules) + module


QKV = SiteCase("qkv", ("q", "k", "v"), 96, (80, 33, 33))
GATE_UP = SiteCase("gate_up", ("gate", "up"), 70, (130, 130), num_experts=4)
DOWN = SiteCase("down", ("down",), 52, (147,), num_experts=4)
LORA_RANKS = [8, 1, 130, 0, 3, 16, 64, 24]
LAYER = 1
"""Where `packed_adapters` puts its adapters."""


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def strided(x: torch.Tensor, extra: int = 5) -> torch.Tensor:
    """The same rows inside a wider buffer."""
    wide = x.new_full((x.shape[0], x[0].numel() + extra), float("nan"))
    view = wide[:, 2 : 2 + x[0].numel()].unflatten(1, x.shape[1:])
    view.copy_(x)
    return view


def packed_adapters(
    generator: torch.Generator,
    site: SiteCase,
    lora_ranks: list[int],
    dtype: torch.dtype,
    *,
    share_a: bool = False,
) -> tuple[SlotTable, torch.Tensor]:
    """A slot per rank in layer 1 of 2, matrices packed at multiples of 64 bytes; rank 0 = an empty slot."""
    experts = max(1, site.num_experts)
    slots = SlotTable(len(lora_ranks), 2, site.entry(0, experts) + 1, torch.device("cpu"))
    pieces, offset = [], 0

    def pack(rows: int, width: int) -> int:
        nonlocal offset
        data = (random(generator, rows, width) / width**0.5).to(dtype).flatten().view(torch.uint8)
        pieces.append(torch.cat([data, data.new_full((-len(data) % 64,), 255)]))
        offset += len(pieces[-1])
        return offset - len(pieces[-1])

    for slot, lora_rank in enumerate(lora_ranks):
        for expert in range(experts if lora_rank else 0):
            for module, width in enumerate(site.out_features):
                index = (slot, 1, site.entry(module, expert))
                first = slots.a_offset[slot, 1, site.entry(0, expert)]
                slots.a_offset[index] = first if share_a and module else pack(lora_rank, site.in_features)
                slots.b_offset[index] = pack(lora_rank, width)
                slots.lora_rank[index] = slots.ranks[slot, index[2]] = lora_rank
                slots.scale[index] = 0.5 + 0.25 * slot
    slots.end_bytes = offset
    return slots, torch.cat(pieces) if pieces else torch.zeros(64, dtype=torch.uint8)


def popularity(generator: torch.Generator, kind: str, rows: int, slots: int) -> torch.Tensor:
    """token_slots of a batch in which adapters are popular in the way `kind` says; some rows have none."""
    if kind == "distinct":
        chosen = torch.arange(rows) % slots
    elif kind == "identical":
        chosen = torch.zeros(rows, dtype=torch.long)
    elif kind == "uniform":
        chosen = torch.randint(-1, slots, (rows,), generator=generator)
    else:
        weights = 1.0 / torch.arange(1, slots + 2)
        chosen = torch.multinomial(weights, rows, replacement=True, generator=generator) - 1
    return chosen.int()


def lora_batch(
    generator: torch.Generator, site: SiteCase, rows: int, kind: str, dtype: torch.dtype, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x, ids and token_slots of a batch at a site; `down` has one input row per output."""
    token_slots = popularity(generator, kind, rows, num_slots)
    if not site.num_experts:
        return random(generator, rows, site.in_features, dtype=dtype), None, token_slots
    ids = torch.randint(-1, site.num_experts, (rows, 2), generator=generator).int()
    x_rows = rows * 2 if site is DOWN else rows
    return random(generator, x_rows, site.in_features, dtype=dtype), ids, token_slots


def paged_case(
    generator: torch.Generator, layout: KvLayout, sequences: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[StepTables, torch.Tensor]:
    """Step tables of (rows in this step, total length) per sequence, and an arena with random contents."""
    lens = [length for _, length in sequences]
    blocks = [-(-length // layout.block_size) for length in lens]
    num_pages = sum(blocks) + 3
    arena = torch.zeros(num_pages * layout.page_bytes, dtype=torch.uint8)
    values = arena.view(dtype)
    values.copy_(random(generator, values.numel()))
    order = torch.randperm(num_pages, generator=generator).int()
    tables = torch.full((len(lens), max(blocks) + 1), -7, dtype=torch.int32)
    for seq, count in enumerate(blocks):
        tables[seq, :count] = order[sum(blocks[:seq]) : sum(blocks[: seq + 1])]
    starts = list(accumulate((rows for rows, _ in sequences), initial=0))
    step = StepTables(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
    )
    return step, arena
