"""The coupled way: deltas computed unmerged, on the instance's own device, from its own arena."""

from __future__ import annotations

import itertools

import torch

from moe_lora.core.shape import ModelShape
from moe_lora.kernels.lora import SharedSegments, Shrunk, lora_expand, lora_shrink
from moe_lora.kernels.step import LoraOperands, SlotTable, StepTables

_NO_DELTA = 0


class LocalBackend:
    """LoraBackend over adapters that lie in this device's arena (see `LoraBackend` for the contract).

    kernel: "sgmv", or a baseline (see `kernels.lora`).
    """

    def __init__(
        self, shape: ModelShape, arena: torch.Tensor, slots: SlotTable, *, kernel: str = "sgmv"
    ) -> None:
        self._sites = shape.sites
        self._arena = arena
        self._slots = slots
        self._kernel = kernel
        self._tickets = itertools.count(1)
        self._pending: dict[int, Shrunk] = {}
        self._step: StepTables | None = None
        self._shared = SharedSegments()
        self._site_ranks: list[int] = []
        self._slot_site_ranks: dict[int, tuple[tuple[int, ...], list[int]]] = {}

    def begin_step(self, step: StepTables) -> None:
        assert not self._pending, "a ticket of the last step was never redeemed"
        self._step = step
        self._shared = SharedSegments()
        live = set(step.row_slot.tolist()) - {-1} if step.has_adapters else ()
        ranks = [self._ranks_by_site(slot) for slot in live]
        self._site_ranks = [max(site) for site in zip(*ranks, strict=True)] or [0] * len(self._sites)

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        step = self._step
        assert step is not None, "begin_step comes first"
        if not self._site_ranks[site]:
            return torch.tensor([_NO_DELTA])
        ticket = next(self._tickets)
        self._pending[ticket] = lora_shrink(
            LoraOperands(x, ids, self._sites[site], layer, step.row_slot, self._slots, self._arena),
            kernel=self._kernel,
            decode=step.decode,
            shared=self._shared,
            batch_rank=self._site_ranks[site],
        )
        return torch.tensor([ticket])

    def add_to(self, ticket: torch.Tensor, y: torch.Tensor) -> None:
        number = ticket.item()
        if number != _NO_DELTA:
            lora_expand(self._pending.pop(int(number)), y)

    def _ranks_by_site(self, slot: int) -> list[int]:
        """The largest rank that the slot's adapter has at each site; 0 where it has none."""
        ranks = self._slots.max_lora_ranks[slot]
        known = self._slot_site_ranks.get(slot)
        if known is None or known[0] is not ranks:
            by_site = [
                max(ranks[site.entry_base : site.entry_base + site.num_entries], default=0)
                for site in self._sites
            ]
            known = self._slot_site_ranks[slot] = (ranks, by_site)
        return known[1]
