# SPDX-License-Identifier: Apache-2.0
"""The optimizer of the base: Muon (momentum, orthogonalised) for the matrices, AdamW for the rest.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Weights

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_MUON_NAMES = ("q", "k", "v", "o", "gate_up", "down")


def orthogonalise(matrices: Tensor) -> Tensor:
    """U @ V.T (about) of each matrix U @ S @ V.T, by five Newton-Schulz steps in bf16.  [n, rows <= cols]."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class MuonAdamW:
    """Steps `weights` in place; `scale` of a step multiplies both learning rates (the schedule)."""

    def __init__(self, weights: Weights, muon_lr: float = 0.02, adam_lr: float = 3e-3) -> None:
        self._muon_lr, self._adam_lr = muon_lr, adam_lr
        self._matrices = [w for name, w in weights.items() if name.split(".")[-1] in _MUON_NAMES]
        others = [w for name, w in weights.items() if name.split(".")[-1] not in _MUON_NAMES]
        self._momenta = [torch.zeros_like(w) for w in self._matrices]
        self._adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update from the `.grad` of the weights, which are cleared."""
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * scale
        self._adam.step()
        self._adam.zero_grad()
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for weight, momentum in zip(self._matrices, self._momenta, strict=True):
            assert weight.grad is not None
            momentum.mul_(0.95).add_(weight.grad)
            update = weight.grad.add(momentum, alpha=0.95)
            weight.grad = None
            # Every square of an expert is its own matrix: gate_up [E, 2F, D] holds two of them.
            rows, cols = min(weight.shape[-2:]), weight.shape[-1]
            by_shape.setdefault((rows, cols), []).append((weight, update.view(-1, rows, cols)))
        for (rows, cols), entries in by_shape.items():
            updates = orthogonalise(torch.cat([update for _, update in entries]))
            sizes = [len(update) for _, update in entries]
            for (weight, _), update in zip(entries, updates.split(sizes), strict=True):
                weight.view(-1, rows, cols).add_(update, alpha=-self._muon_lr * scale)

    def state(self) -> dict:
        """Everything needed to go on after a stop."""
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state(self, state: dict) -> None:
        """Take back what `state` gave."""
        for momentum, saved in zip(self._momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        self._adam.load_state_dict(state["adam"])
