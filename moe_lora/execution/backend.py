"""The interface behind which every way of computing a LoRA delta stands."""

from __future__ import annotations

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
