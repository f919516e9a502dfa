# SPDX-License-Identifier: Apache-2.0
"""Sites and batches for the GPU kernel tests, small enough for the interpreter, and an fp64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_lora.kernels.operands import LoraOperands, SlotTable
from moe_lora.kernels.reference import arena_rows, input_rows
from tests.kernels.kernel_cases import SiteCase, packed_adapters, popularity, random

LAYER = 1
RANKS = [8, 1, 70, 0, 3]
QKV = SiteCase("qkv", ("q", "k", "v"), 64, (80, 16, 24))
ODD = SiteCase("o", ("o",), 37, (29,))
GATE_UP = SiteCase("gate_up", ("gate", "up"), 48, (32, 32), num_experts=3)
DOWN = SiteCase("down", ("down",), 35, (21,), num_experts=3)
SITES = (QKV, ODD, GATE_UP, DOWN)
EVEN_QKV = SiteCase("qkv", ("q", "k", "v"), 64, (80, 16, 144))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@dataclass
class Batch:
    """Operands of one site, on one device."""

    x: torch.Tensor
    ids: torch.Tensor | None
    site: SiteCase
    token_slots: torch.Tensor
    slots: SlotTable
    arena: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.token_slots.numel() if self.ids is None else self.ids.numel()

    def operands(self) -> LoraOperands:
        return LoraOperands(self.x, self.ids, self.site, LAYER, self.token_slots, self.slots, self.arena)

    def output(self, fill: float = float("nan")) -> torch.Tensor:
        return torch.full((self.num_rows, sum(self.site.out_features)), fill).to(self.x)

    def tokens(self, pick: list[int]) -> Batch:
        """The same adapters with these tokens only."""
        index = torch.tensor(pick, dtype=torch.long, device=self.x.device)
        per_token = self.x.shape[0] // self.token_slots.numel()
        x = self.x.unflatten(0, (-1, per_token))[index].flatten(0, 1)
        ids = None if self.ids is None else self.ids[index]
        return Batch(x, ids, self.site, self.token_slots[index], self.slots, self.arena)


def make_batch(
    site: SiteCase,
    dtype: torch.dtype,
    kind: str,
    device: torch.device,
    *,
    tokens: int = 5,
    lora_ranks: list[int] = RANKS,
    share_a: bool = False,
    seed: int = 7,
) -> Batch:
    """A random batch; the bytes around its matrices are NaN."""
    generator = torch.Generator().manual_seed(seed)
    slots, arena = packed_adapters(generator, site, lora_ranks, dtype, share_a=share_a)
    arena = torch.cat([arena, torch.full((64,), 255, dtype=torch.uint8)]).to(device)
    for name in ("a_offset", "b_offset", "lora_rank", "scale"):
        setattr(slots, name, getattr(slots, name).to(device))
    token_slots = popularity(generator, kind, tokens, len(lora_ranks)).to(device)
    ids = None
    if site.num_experts:
        ids = torch.randint(-1, site.num_experts, (tokens, 2), generator=generator).int().to(device)
    x = random(generator, tokens * (2 if site.name == "down" else 1), site.in_features, dtype=dtype)
    return Batch(x.to(device), ids, site, token_slots, slots, arena)


def exact_delta(batch: Batch) -> torch.Tensor:
    """Deltas in fp64 on the batch's device, segment by segment."""
    site, slots, x = batch.site, batch.slots, batch.x.double()
    out = torch.zeros(batch.num_rows, sum(site.out_features), dtype=torch.float64, device=x.device)
    slot, expert, source = batch.token_slots.long(), torch.zeros_like(batch.token_slots), None
    if batch.ids is not None:
        slot, expert = slot.repeat_interleave(batch.ids.shape[1]), batch.ids.flatten()
        source = input_rows(batch.x, batch.ids)
    for pair in torch.unique(torch.stack([slot, expert], 1), dim=0).tolist():
        if min(pair) < 0:
            continue
        rows = ((slot == pair[0]) & (expert == pair[1])).nonzero()[:, 0]
        segment = x[rows if source is None else source[rows]]
        for module, (column, width) in enumerate(zip(site.columns, site.out_features, strict=True)):
            index = (pair[0], LAYER, site.entry(module, pair[1]))
            lora_rank = int(slots.lora_rank[index])
            a, b = (
                arena_rows(batch.arena, int(offset[index]), lora_rank, size, batch.x.dtype).double()
                for offset, size in ((slots.a_offset, site.in_features), (slots.b_offset, width))
            )
            out[rows, column : column + width] = float(slots.scale[index]) * (segment @ a.T) @ b
    return out


def assert_delta(actual: torch.Tensor, batch: Batch) -> None:
    """Within one rounding of the dtype of the fp64 oracle."""
    tolerance = TOLERANCE[batch.x.dtype]
    torch.testing.assert_close(actual.double(), exact_delta(batch), rtol=tolerance, atol=tolerance / 4)
