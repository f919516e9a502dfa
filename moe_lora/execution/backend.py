"""The interface behind which every way of computing a LoRA delta stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from moe_lora.kernels.step import StepTables


class LoraBackend(Protocol):
    """Computes y += delta for the rows of a step, while the caller runs the base GEMM in between.

    Per site: `ticket = begin(...)`, base GEMM into y, `add_to(ticket, y)`.  A ticket is an int64 [1] CPU
    tensor, so that it passes through compiled code; each is redeemed exactly once, in any order.
    """

    def begin_step(self, step: StepTables) -> None:
        """Announce the batch whose sites follow."""
        ...

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Start the deltas of one site.

        x: [T, d_in] (or [T*K, d_in] at an expert site whose rows are already spread over the experts).
        ids: None at a dense site, else [T, K] int32 experts of each token row, numbered in the whole model,
        -1 for padding and for experts that another rank holds.
        x may be overwritten once the base GEMM has read it.
        """
        ...

    def add_to(self, ticket: torch.Tensor, y: torch.Tensor) -> None:
        """Add the deltas to the site's output y: [T or T*K, sum of the site's out_features]."""
        ...


class SplitBackend:
    """Each site is computed by one of two backends.  remote_sites: per site whether `remote` has it.

    A ticket's lowest bit tells whose it is.
    """

    def __init__(self, local: LoraBackend, remote: LoraBackend, remote_sites: Sequence[bool]) -> None:
        self._backends = (local, remote)
        self._remote_sites = tuple(remote_sites)

    def begin_step(self, step: StepTables) -> None:
        for backend in self._backends:
            backend.begin_step(step)

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        which = self._remote_sites[site]
        return self._backends[which].begin(layer, site, x, ids) * 2 + which

    def add_to(self, ticket: torch.Tensor, y: torch.Tensor) -> None:
        number = int(ticket.item())
        self._backends[number & 1].add_to(torch.tensor([number >> 1]), y)
