"""The second half of a decoder layer: a dense MLP, or a choice of experts.

Legend: T token rows, E experts, K experts per token, F expert (or dense) inner size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.kernels import ops

from .linear import ExpertLinear, LoraLinear
from .spec import ModelSpec


def glu(y: torch.Tensor, activation: str, limit: float) -> torch.Tensor:
    """Gated activation of the fused [rows, 2F] output of gate and up -> [rows, F]."""
    gate, up = y.float().chunk(2, dim=-1)
    if activation == "silu":
        return (F.silu(gate) * up).to(y.dtype)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(y.dtype)


class DenseMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = LoraLinear(spec.shape, "gate_up", bias=spec.mlp_bias)
        self.down = LoraLinear(spec.shape, "down", bias=spec.mlp_bias)
        self.activation, self.limit = spec.activation, spec.activation_limit

    def forward(self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor) -> torch.Tensor:
        return self.down(glu(self.gate_up(x, channel), self.activation, self.limit), channel)


class MoeMlp(nn.Module):
    """Weighted sum of the chosen experts' outputs, in expert order.

    experts: those held here.  Outputs of the others come from the ranks that hold them.
    """

    def __init__(self, spec: ModelSpec, experts: range) -> None:
        super().__init__()
        shape = spec.shape
        self.gate = LoraLinear(shape, "router", bias=spec.gate_bias)
        self.gate_up = ExpertLinear(shape, "gate_up", experts, bias=spec.mlp_bias)
        self.down = ExpertLinear(shape, "down", experts, bias=spec.mlp_bias)
        self.experts = experts
        self.holds_all = len(experts) == shape.num_experts
        self.top_k = shape.num_experts_per_token
        self.gate_kind, self.gate_norm = spec.gate, spec.gate_norm
        self.activation, self.limit = spec.activation, spec.activation_limit

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert weights [T, K] fp32 and ids [T, K] int32, ids ascending in each row."""
        scores = logits_TE.float()
        if self.gate_kind == "softmax_topk":
            scores = torch.softmax(scores, dim=-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        if self.gate_kind == "topk_softmax":
            weights = torch.softmax(weights, dim=-1)
        elif self.gate_norm is not None:
            weights = weights / weights.norm(p=self.gate_norm, dim=-1, keepdim=True)
        ids, order = ids.sort(dim=-1)
        return weights.gather(-1, order), ids.int()

    def forward(self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = self.choose(self.gate(x, channel))
        ids_TK = torch.where(live_T[:, None], ids_TK, -1)
        own_TK = ids_TK if self.holds_all else self.held(ids_TK)
        inner = glu(self.gate_up(x, own_TK, channel), self.activation, self.limit)
        out = self.down(inner, own_TK, channel)
        if not self.holds_all:
            ops.exchange_experts(channel, out, ids_TK)
        out = out.view(x.shape[0], self.top_k, -1)
        return (out.float() * weights_TK[..., None]).sum(1).to(x.dtype)

    def held(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The ids, -1 in place of experts that are not held here."""
        return torch.where((ids_TK >= self.experts.start) & (ids_TK < self.experts.stop), ids_TK, -1)
