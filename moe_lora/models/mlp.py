# SPDX-License-Identifier: Apache-2.0
"""The MLP of a decoder layer: dense, or experts behind a gate."""

from __future__ import annotations

import torch
from torch import nn

from moe_lora.core.shard import ModelShard
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops

from .linear import ExpertLinear, LoraLinear, glu
from .quantised_weight import QuantisedWeight


def has_bias(shard: ModelShard, site_name: str) -> bool:
    """The first rank adds the bias to a sum over ranks."""
    return shard.dist_rank == 0 or not shard.is_summed(shard.whole.site(site_name))


class DenseMlp(nn.Module):
    """down(silu(gate(x)) * up(x)).  spec: sizes of the shard."""

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        super().__init__()
        self.is_summed = shard.divides_inner
        self.gate_up = LoraLinear(spec.shape, "gate_up", bias=spec.mlp_bias)
        self.down = LoraLinear(spec.shape, "down", bias=spec.mlp_bias and has_bias(shard, "down"))
        self.activation, self.limit = spec.activation, spec.activation_limit

    def forward(self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor) -> torch.Tensor:
        y = self.down(glu(self.gate_up(x, channel), self.activation, self.limit), channel)
        if self.is_summed:
            ops.sum_over_ranks(channel, y)
        return y


class MoeMlp(nn.Module):
    """Weighted sum of the chosen experts' outputs, in expert order.

    spec: sizes of the shard.  Ranks with the experts send outputs of absent experts.
    """

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        super().__init__()
        shape, experts = spec.shape, shard.experts
        self.is_summed = shard.divides_inner
        self.gate = LoraLinear(shape, "router", bias=spec.gate_bias)
        self.gate_up = ExpertLinear(shape, "gate_up", experts, bias=spec.mlp_bias)
        self.down = ExpertLinear(shape, "down", experts, bias=spec.mlp_bias and has_bias(shard, "down"))
        self.experts = experts
        self.holds_all = len(experts) == shape.num_experts
        self.top_k = shape.num_experts_per_token
        self.gate_kind, self.gate_norm = spec.gate, spec.gate_norm
        self.activation, self.limit = spec.activation, spec.activation_limit

    def choose(
        self, logits_TE: torch.Tensor, live_T: torch.Tensor, channel: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Expert weights [T, K] fp32 and ids [T, K] int32, ascending in each row, -1 in rows of padding.

        The third item is rows by local expert, for a GPU's kernels; None for other devices and quantised
        weights.
        """
        if logits_TE.is_cuda:
            softmax_first = self.gate_kind == "softmax_topk"
            num_held = len(self.experts) if self.takes_order() else 0
            how = (self.top_k, softmax_first, self.gate_norm or 0.0, self.experts.start, num_held)
            site = self.gate_up.site if self.holds_all else -1
            weights, ids, order = ops.choose_experts(channel, logits_TE, live_T, *how, site)
            return weights, ids, order if num_held else None
        scores = logits_TE.float()
        if self.gate_kind == "softmax_topk":
            scores = torch.softmax(scores, dim=-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        if self.gate_kind == "topk_softmax":
            weights = torch.softmax(weights, dim=-1)
        elif self.gate_norm is not None:
            weights = weights / weights.norm(p=self.gate_norm, dim=-1, keepdim=True)
        ids, order = ids.sort(dim=-1)
        return weights.gather(-1, order), torch.where(live_T.unsqueeze(1), ids.int(), -1), None

    def forward(self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK, order = self.choose(self.gate(x, channel), live_T, channel)
        own_TK = ids_TK if self.holds_all else self.held(ids_TK)
        inner = self.gate_up.gated(x, own_TK, channel, order, self.activation, self.limit)
        out = self.down(inner, own_TK, channel, order)
        if not self.holds_all:
            ops.exchange_experts(channel, out, ids_TK)
        y = ops.sum_experts(out, weights_TK)
        if self.is_summed:
            ops.sum_over_ranks(channel, y)
        return y

    def takes_order(self) -> bool:
        """True if a GPU computes some expert layers from rows by expert."""
        return not all(isinstance(one.weight, QuantisedWeight) for one in (self.gate_up, self.down))

    def held(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The ids, with -1 for absent experts."""
        return torch.where((ids_TK >= self.experts.start) & (ids_TK < self.experts.stop), ids_TK, -1)
