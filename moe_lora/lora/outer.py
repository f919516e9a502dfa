# SPDX-License-Identifier: Apache-2.0
"""Deltas of embedding and vocabulary head, always from this device's arena.

Legend: T token rows, S rows with logits, R LoRA rank, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moe_lora.core.shape import Site
from moe_lora.kernels.lora import lora_expand, lora_shrink
from moe_lora.kernels.operands import LoraOperands, SlotTable, StepTables

from .row_routing import RowRouting, Source


class OuterDeltas:
    """One step's deltas.  sites: head, embedding.  layer: of the slot table."""

    def __init__(
        self, sites: Sequence[Site], layer: int, arena: torch.Tensor, slots: SlotTable, kernel: str
    ) -> None:
        self._head, self._embedding = sites
        self._layer = layer
        self._arena = arena
        self._slots = slots
        self._kernel = kernel
        self._decode = False
        self._host_slots = np.empty(0, dtype=np.int32)
        self._logit_slots = torch.empty(0, dtype=torch.int32)
        self._ranks: Sequence[int] = (0, 0)

    def begin_step(self, step: StepTables, routing: RowRouting, logit_rows: torch.Tensor) -> None:
        """Set the batch.  logit_rows: [S] int64."""
        assert routing.outer is not None, "no row has outer deltas"
        self._decode = step.decode
        slots = self._host_slots = np.ascontiguousarray(
            routing.terms_from(Source.LOCAL, routing.outer)["slot"]
        )
        on_device = routing.on_device.get((Source.LOCAL, routing.outer))
        on_device = torch.from_numpy(slots).to(self._arena.device) if on_device is None else on_device
        self._logit_slots = on_device.index_select(0, logit_rows)
        bounds = routing.site_ranks
        sites = (self._head, self._embedding)
        self._ranks = self._slots.site_ranks(slots, sites) if bounds is None else bounds[-2:]

    def add_to_logits(self, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """logits += scale * (hidden @ A.T) @ B.T.  logits: [S, V] or this rank's columns.  hidden: [S, H]."""
        if not self._ranks[0] or not logits.numel():
            return
        rows = (self._logit_slots, self._slots, self._arena)
        operands = LoraOperands(hidden, None, self._head, self._layer, *rows)
        shrunk = lora_shrink(operands, kernel=self._kernel, decode=self._decode, batch_rank=self._ranks[0])
        lora_expand(shrunk, logits)

    def add_to_embedding(self, x: torch.Tensor, tokens: torch.Tensor) -> None:
        """x[t] += scale * B @ A[:, tokens[t]], summed over R in order.  x: [T, H].  tokens: [T] int64."""
        if not self._ranks[1]:
            return
        site, elements = self._embedding, self._arena.view(x.dtype)
        for slot in sorted(set(self._host_slots.tolist()) - {-1}):
            lora_rank = int(self._slots.ranks[slot, site.entry_base])
            if not lora_rank:
                continue
            rows = torch.from_numpy(np.flatnonzero(self._host_slots == slot)).to(x.device)
            entry = (slot, self._layer, site.entry_base)
            starts = (
                offsets[entry] // x.element_size() for offsets in (self._slots.a_offset, self._slots.b_offset)
            )
            first_a, first_b = starts
            rank_rows = torch.arange(lora_rank, device=x.device).unsqueeze(1)
            a_RT = elements[first_a + rank_rows * site.in_features + tokens[rows]].float()
            b_RH = elements[first_b : first_b + lora_rank * x.shape[1]].view(lora_rank, -1).float()
            if lora_rank < x.shape[1]:
                total = _sum_in_order(a_RT, b_RH)
            else:  # a replaced matrix: B is an identity
                total = a_RT.t() @ b_RH
            total *= self._slots.scale[entry]
            x[rows] = x[rows] + total.to(x.dtype)


def _sum_in_order(a_RT: torch.Tensor, b_RH: torch.Tensor) -> torch.Tensor:
    """a_RT.T @ b_RH, summed over R in order, zeros left out."""
    ranks, rows = ((a_RT != 0).any(dim).nonzero().squeeze(1) for dim in (1, 0))
    some = b_RH.new_zeros(len(rows), b_RH.shape[1])
    for a_T, b_H in zip(a_RT[ranks][:, rows], b_RH[ranks], strict=True):
        some.addcmul_(a_T.unsqueeze(1), b_H)
    return b_RH.new_zeros(a_RT.shape[1], b_RH.shape[1]).index_copy_(0, rows, some)
