# SPDX-License-Identifier: Apache-2.0
"""Merges one adapter into the base weights in place, and restores the weights.

Legend: E local experts, N output width of a site, H input width, R LoRA rank.  An unmerge copies the original
bytes back from the host: weights stay bit-identical over any number of merges (dLoRA subtracts, and drifts).
The router is never merged: a rounded correction could choose other experts for another adapter's rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from moe_lora.core.shape import ModelShape, Site
from moe_lora.kernels.operands import SlotTable
from moe_lora.kernels.reference import arena_rows

from .causal_lm import CausalLM
from .linear import ExpertLinear, LoraLinear

NEVER_MERGED = ("router",)
"""Sites with deltas beside the weights."""

_SCRATCH = 1 << 21
"""fp32 numbers (8 MB) for products: bounds a merge's memory, and fits a CPU's caches."""


@dataclass(frozen=True)
class HeldAdapter:
    """Places of an adapter's A and B on this device.

    Reads the table once, after a wait for the device; invalid after a change of the slot.
    """

    arena: torch.Tensor
    slots: SlotTable
    slot: int

    @cached_property
    def lora_ranks(self) -> np.ndarray:
        """[L, X] rank of each entry."""
        return self._column(self.slots.lora_rank)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[L, X] each: offsets of A and B, scale."""
        slots = self.slots
        return self._column(slots.a_offset), self._column(slots.b_offset), self._column(slots.scale)

    def _column(self, column: torch.Tensor) -> np.ndarray:
        return column[self.slot].to("cpu", copy=True).numpy()

    def delta_operands(
        self, layer: int, site: Site, entry: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """B [N, R] and A [R, H], both fp32, and the scale of one entry."""
        a_offset, b_offset, scale = (column[layer, entry].item() for column in self._places)
        width = site.out_features[(entry - site.entry_base) % len(site.modules)]
        lora_rank = int(self.lora_ranks[layer, entry])
        a = arena_rows(self.arena, a_offset, lora_rank, site.in_features, dtype)
        b = arena_rows(self.arena, b_offset, lora_rank, width, dtype)
        return b.float().T, a.float(), scale


def can_be_merged(model: CausalLM) -> bool:
    """True without quantised weights."""
    sites = (module for layer in model.layers for module in layer.modules())
    weights = (module.weight for module in sites if isinstance(module, LoraLinear | ExpertLinear))
    return all(isinstance(weight, torch.nn.Parameter) for weight in weights)


class WeightMerge:
    """The weights of one rank's model, and their merge state.

    merged: [L, sites] bool.  One adapter at a time: unmerge all of an adapter before the next.
    """

    def __init__(self, model: CausalLM) -> None:
        self.shape: ModelShape = model.spec.shape
        self.shard = model.shard
        self.merged = np.zeros((self.shape.num_layers, len(self.shape.sites)), dtype=bool)
        self._weights: dict[tuple[int, int], torch.Tensor] = {}
        for number, layer in enumerate(model.layers):
            for module in layer.modules():
                if isinstance(module, LoraLinear | ExpertLinear):
                    assert isinstance(module.weight, torch.nn.Parameter), "quantised weights stay unmerged"
                    self._weights[number, module.site] = module.weight
        for key in list(self._weights):
            if self.shape.sites[key[1]].name in NEVER_MERGED:
                del self._weights[key]
        self._originals: dict[tuple[tuple[int, int], int], torch.Tensor] = {}
        """By piece and entry."""
        self.kept_modules: set[str] = set()
        """Target modules with originals."""
        self._scratch: torch.Tensor | None = None

    def pieces(self, held: HeldAdapter, sites: frozenset[int]) -> list[tuple[int, int]]:
        """The pieces that the adapter changes at these sites, in a step's order."""
        ranks = held.lora_ranks
        return [
            (layer, number)
            for layer, number in sorted(self._weights)
            if number in sites and ranks[layer, _entries(self.shape.sites[number])].any()
        ]

    def num_bytes(self, piece: tuple[int, int]) -> int:
        """Bytes of the site's weights."""
        return self._weights[piece].nbytes

    def bytes_of(self, modules: Collection[str]) -> int:
        """Bytes of this rank's weights that these target modules change."""
        changed = 0
        for (_, number), weight in self._weights.items():
            site = self.shape.sites[number]
            widths = [w for m, w in zip(site.modules, site.out_features, strict=True) if m in modules]
            changed += weight.nbytes * sum(widths) // site.total_out_features
        return changed

    def kept_bytes(self) -> int:
        """Host memory of original weights."""
        return sum(original.nbytes for original in self._originals.values())

    @torch.inference_mode()
    def fold_in(self, piece: tuple[int, int], held: HeldAdapter) -> None:
        """W = round(W + scale * B A) at one piece."""
        assert not self.merged[piece]
        modules = self.shape.sites[piece[1]].modules
        for entry, module, rows in self._parts(piece, held):
            key = piece, entry
            if key not in self._originals:
                self.kept_modules.add(modules[module])
                kept = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
                self._originals[key] = kept.copy_(rows)
            self._add_product(rows, *self._operands(piece, entry, held))
        self.merged[piece] = True

    def _add_product(self, rows: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scale: float) -> None:
        """rows = round(rows + scale * b a), some at a time."""
        if self._scratch is None:
            self._scratch = torch.empty(_SCRATCH, dtype=torch.float32, device=rows.device)
        num_rows = max(1, _SCRATCH // rows.shape[1])
        for some, b_some in zip(rows.split(num_rows), b.split(num_rows), strict=True):
            total = self._scratch[: some.numel()].view(some.shape)
            some.copy_(total.copy_(some).addmm_(b_some, a, alpha=scale))

    @torch.inference_mode()
    def take_out(self, piece: tuple[int, int], held: HeldAdapter) -> None:
        """W as before, bit for bit.  held: the merged adapter."""
        assert self.merged[piece]
        for entry, _, rows in self._parts(piece, held):
            rows.copy_(self._originals[piece, entry])
        self.merged[piece] = False

    @torch.inference_mode()
    def restore(self) -> None:
        """Write all original bytes back, also of pieces with a partial failure."""
        for (piece, entry), original in self._originals.items():
            self._rows(piece, entry).copy_(original)
        self.merged[:] = False

    @torch.inference_mode()
    def rounding(
        self, piece: tuple[int, int], held: HeldAdapter, num_rows: int = 32
    ) -> Iterator[tuple[int, float, float]]:
        """The rounding error of a merge in this dtype, for each changed module.

        Yields its number, |W_a - W - delta|^2 and |delta|^2, norms over about num_rows rows of one expert.
        """
        seen: set[int] = set()
        for entry, module, rows in self._parts(piece, held):
            if module in seen:
                continue
            seen.add(module)
            chosen = slice(None, None, max(1, len(rows) // num_rows))
            before = self._originals.get((piece, entry), rows)[chosen].to(rows.device).float()
            b, a, scale = self._operands(piece, entry, held)
            delta = (scale * (b[chosen] @ a)).double()
            after = torch.addmm(before, b[chosen], a, alpha=scale).to(rows.dtype).double()
            lost = (after - before.double() - delta).square().sum()
            yield module, float(lost), float(delta.square().sum())

    def checksum(self) -> str:
        """Checksum of the mergeable weights."""
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(self._weights):
            digest.update(self._weights[key].detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _operands(
        self, piece: tuple[int, int], entry: int, held: HeldAdapter
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        layer, number = piece
        return held.delta_operands(layer, self.shape.sites[number], entry, self._weights[piece].dtype)

    def _parts(self, piece: tuple[int, int], held: HeldAdapter) -> Iterator[tuple[int, int, torch.Tensor]]:
        layer, number = piece
        site, ranks = self.shape.sites[number], held.lora_ranks[layer]
        for expert in self.shard.copies(site) if site.num_experts else (0,):
            for module in range(len(site.modules)):
                entry = site.entry(module, expert)
                if ranks[entry]:
                    yield entry, module, self._rows(piece, entry)

    def _rows(self, piece: tuple[int, int], entry: int) -> torch.Tensor:
        site, weight = self.shape.sites[piece[1]], self._weights[piece]
        expert, module = divmod(entry - site.entry_base, len(site.modules))
        matrix = weight[expert - self.shard.copies(site).start] if site.num_experts else weight
        return matrix.narrow(0, site.columns[module], site.out_features[module])


def _entries(site: Site) -> slice:
    return slice(site.entry_base, site.entry_base + site.num_entries)
