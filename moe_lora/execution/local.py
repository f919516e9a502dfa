"""The coupled way: deltas computed unmerged, on the instance's own device, from its own arena."""

from __future__ import annotations

import itertools

import torch

from moe_lora.core.shape import ModelShape
from moe_lora.kernels import cpu, reference
from moe_lora.kernels.step import SlotTable, StepTables

_NO_DELTA = 0


class LocalBackend:
    """LoraBackend over adapters that lie in this device's arena (see `LoraBackend` for the contract)."""

    def __init__(self, shape: ModelShape, arena: torch.Tensor, slots: SlotTable) -> None:
        self._sites = shape.sites
        self._arena = arena
        self._slots = slots
        self._tickets = itertools.count(1)
        self._pending: dict[int, cpu.Shrunk | torch.Tensor] = {}
        self._step: StepTables | None = None
        self._site_ranks: list[int] = []
        self._slot_site_ranks: dict[int, tuple[tuple[int, ...], list[int]]] = {}

    def begin_step(self, step: StepTables) -> None:
        assert not self._pending, "a ticket of the last step was never redeemed"
        self._step = step
        live = set(step.row_slot.tolist()) - {-1} if step.has_adapters else ()
        ranks = [self._ranks_by_site(slot) for slot in live]
        self._site_ranks = [max(site) for site in zip(*ranks, strict=True)] or [0] * len(self._sites)

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        step = self._step
        assert step is not None, "begin_step comes first"
        if not self._site_ranks[site]:
            return torch.tensor([_NO_DELTA])
        ticket = next(self._tickets)
        operands = (x, ids, self._sites[site], layer, step.row_slot, self._slots, self._arena)
        self._pending[ticket] = cpu.lora_shrink(*operands) if x.is_cpu else reference.lora_delta(*operands)
        return torch.tensor([ticket])

    def add_to(self, ticket: torch.Tensor, y: torch.Tensor) -> None:
        number = ticket.item()
        if number == _NO_DELTA:
            return
        started = self._pending.pop(int(number))
        if isinstance(started, cpu.Shrunk):
            cpu.lora_expand(started, y)
        else:
            y.add_(started)

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
