# SPDX-License-Identifier: Apache-2.0
"""The MLP of a decoder layer: dense, experts behind a gate, or both.

Legend: T token rows, K chosen experts, E experts, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from moe_lora.core.shard import ModelShard
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops

from .linear import ExpertLinear, Fp32Linear, Fp32Vector, LoraLinear, glu, parameter
from .quantised_weight import QuantisedWeight

NO_ZERO = 1e-20
"""Added to a norm: chosen sigmoids may all be 0."""


def has_bias(shard: ModelShard, site_name: str) -> bool:
    """The first rank adds the bias to a sum over ranks."""
    return shard.dist_rank == 0 or not shard.is_summed(shard.whole.site(site_name))


class DenseMlp(nn.Module):
    """down(silu(gate(x)) * up(x)).  kind: start of the sites' names."""

    def __init__(self, spec: ModelSpec, shard: ModelShard, kind: str = "") -> None:
        super().__init__()
        self.is_summed = shard.divides_inner
        down = f"{kind}down"
        self.gate_up = LoraLinear(spec.shape, f"{kind}gate_up", bias=spec.mlp_bias)
        self.down = LoraLinear(spec.shape, down, bias=spec.mlp_bias and has_bias(shard, down))
        self.activation, self.limit = spec.activation, spec.activation_limit

    def summand(self, x: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        """This rank's part of the output."""
        return self.down(glu(self.gate_up(x, channel), self.activation, self.limit), channel)

    def forward(self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor) -> torch.Tensor:
        y = self.summand(x, channel)
        if self.is_summed:
            ops.sum_over_ranks(channel, y)
        return y


class MoeMlp(nn.Module):
    """Weighted sum of the chosen experts' outputs, in expert order.

    Other ranks send outputs of absent experts.
    """

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        super().__init__()
        shape, experts = spec.shape, shard.experts
        self.is_summed = shard.divides_inner
        gate = Fp32Linear if spec.gate_in_fp32 else LoraLinear
        self.gate = gate(shape, "router", bias=spec.gate_bias)
        self.gate_up = ExpertLinear(shape, "gate_up", experts, bias=spec.mlp_bias)
        self.down = ExpertLinear(shape, "down", experts, bias=spec.mlp_bias and has_bias(shard, "down"))
        self.experts = experts
        self.holds_all = len(experts) == shape.num_experts
        self.top_k = shape.num_experts_per_token
        self.gate_kind, self.gate_norm = spec.gate, spec.gate_norm
        self.correction = Fp32Vector(shape.num_experts) if spec.gate_correction else None
        self.groups, self.group_scores = (spec.gate_groups, spec.top_groups), spec.group_scores
        self.scale = spec.routed_scale
        kinds = ("topk_softmax", "softmax_topk", "sigmoid_topk")
        numbers = (self.top_k, kinds.index(self.gate_kind), self.gate_norm or 0.0, *self.groups, self.scale)
        self.choice = [float(one) for one in numbers]
        self.activation, self.limit = spec.activation, spec.activation_limit

    def choose(
        self, logits_TE: torch.Tensor, live_T: torch.Tensor, channel: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Expert weights [T, K] fp32 and ids [T, K] int32, ascending in each row, -1 in rows of padding.

        Third: rows by local expert, for a GPU's kernels; None on CPU and for quantised weights.
        """
        if logits_TE.is_cuda:
            num_held = len(self.experts) if self.takes_order() else 0
            site = self.gate_up.site if self.holds_all else -1
            correction = None if self.correction is None else self.correction.weight
            given = (correction, self.choice, self.experts.start, num_held, site)
            weights, ids, order = ops.choose_experts(channel, logits_TE, live_T, *given)
            return weights, ids, order if num_held else None
        scores = logits_TE.float()
        if self.gate_kind == "softmax_topk":
            scores = torch.softmax(scores, dim=-1)
        elif self.gate_kind == "sigmoid_topk":
            scores = torch.sigmoid(scores)
        weights, ids = self.largest(scores)
        if self.gate_kind == "topk_softmax":
            weights = torch.softmax(weights, dim=-1)
        elif self.gate_norm is not None:
            weights = weights / (weights.norm(p=self.gate_norm, dim=-1, keepdim=True) + NO_ZERO)
        if self.scale != 1.0:
            weights = weights * self.scale
        ids, order = ids.sort(dim=-1)
        return weights.gather(-1, order), torch.where(live_T.unsqueeze(1), ids.int(), -1), None

    def largest(self, scores_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The top k scores, and their experts: by corrected score, within the best groups."""
        if self.correction is None and self.groups[0] == 1:
            return scores_TE.topk(self.top_k, dim=-1)
        ranked = scores_TE if self.correction is None else scores_TE + self.correction.weight
        num_groups, top_groups = self.groups
        if num_groups > 1:
            by_group = ranked.view(len(ranked), num_groups, -1)
            best = by_group.topk(self.group_scores, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
            kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, True)
            ranked = by_group.masked_fill(~kept.unsqueeze(-1), -float("inf")).flatten(1)
        ids = ranked.topk(self.top_k, dim=-1).indices
        return scores_TE.gather(-1, ids), ids

    def summand(
        self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's part of the output.  seen: by the gate; None: x."""
        logits_TE = self.gate(x if seen is None else seen, channel)
        weights_TK, ids_TK, order = self.choose(logits_TE, live_T, channel)
        own_TK = ids_TK if self.holds_all else self.held(ids_TK)
        inner = self.gate_up.gated(x, own_TK, channel, order, self.activation, self.limit)
        out = self.down(inner, own_TK, channel, order)
        if not self.holds_all:
            ops.exchange_experts(channel, out, ids_TK)
        return ops.sum_experts(out, weights_TK)

    def forward(self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor) -> torch.Tensor:
        y = self.summand(x, channel, live_T)
        if self.is_summed:
            ops.sum_over_ranks(channel, y)
        return y

    def takes_order(self) -> bool:
        """True if a GPU uses rows by expert."""
        return not all(isinstance(one.weight, QuantisedWeight) for one in (self.gate_up, self.down))

    def held(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The ids, with -1 for absent experts."""
        return torch.where((ids_TK >= self.experts.start) & (ids_TK < self.experts.stop), ids_TK, -1)


class SharedMoeMlp(MoeMlp):
    """`MoeMlp` plus an expert of all tokens, scaled by its gate's sigmoid, if any."""

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        super().__init__(spec, shard)
        self.shared = DenseMlp(spec, shard, "shared_")
        self.shared_gate = None
        if spec.shape.has_shared_gate:
            self.shared_gate = LoraLinear(spec.shape, "shared_gate", bias=False)

    def summand(
        self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        shared = self.shared.summand(x, channel)
        if self.shared_gate is not None:
            shared = (torch.sigmoid(self.shared_gate(x, channel).float()) * shared).to(x.dtype)
        return super().summand(x, channel, live_T, seen) + shared


class SparseMixerMlp(MoeMlp):
    """`MoeMlp` with Phi-3.5-MoE's gate: the best expert, then the best of the others.

    Each weight is a softmax over the experts within 2 * jitter of the chosen score, relative to the larger of
    that score and the expert's absolute score.  Source: SparseMixer-v2 (GRIN, arXiv 2409.12136).
    """

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        super().__init__(replace(spec, gate="topk_softmax"), shard)
        self.jitter = spec.gate_jitter

    def choose(
        self, logits_TE: torch.Tensor, live_T: torch.Tensor, channel: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scores = logits_TE.float()
        left, weights_TE = scores, torch.full_like(scores, float("-inf"))
        for _ in range(self.top_k):
            best, chosen = left.max(dim=-1, keepdim=True)
            far = (best - scores) / scores.abs().clamp(min=best) > 2 * self.jitter
            weight = left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, chosen)
            weights_TE = weights_TE.scatter(-1, chosen, weight)
            left = left.scatter(-1, chosen, float("-inf"))
        _, ids_TK, order = super().choose(weights_TE, live_T, channel)
        return weights_TE.gather(-1, ids_TK.clamp(min=0).long()), ids_TK, order


class DenseBesideMlp(MoeMlp):
    """norm(dense(norm(x))) + norm(experts(norm(x))), with experts chosen by norm(x) / sqrt(H).

    The expert's scale multiplies the weight.
    """

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        from .causal_lm import Norm

        super().__init__(spec, shard)
        hidden = spec.shape.hidden_size
        self.shared = DenseMlp(spec, shard, "shared_")
        self.shared_norm, self.add_shared = Norm(hidden, spec), Norm(hidden, spec)
        self.routed_norm, self.add_routed = Norm(hidden, spec), Norm(hidden, spec)
        self.seen_norm, self.seen_factor = Norm(hidden, spec), hidden**-0.5
        self.expert_scale = parameter(spec.shape.num_experts)

    def choose(
        self, logits_TE: torch.Tensor, live_T: torch.Tensor, channel: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        weights_TK, ids_TK, order = super().choose(logits_TE, live_T, channel)
        return weights_TK * self.expert_scale[ids_TK.clamp(min=0).long()].float(), ids_TK, order

    def forward(self, x: torch.Tensor, channel: torch.Tensor, live_T: torch.Tensor) -> torch.Tensor:
        shared = self.shared.summand(self.shared_norm(x), channel)
        seen = self.seen_norm(x) * self.seen_factor
        routed = self.summand(self.routed_norm(x), channel, live_T, seen)
        if self.is_summed:
            both = torch.stack([shared, routed])
            ops.sum_over_ranks(channel, both)
            shared, routed = both.unbind()
        return self.add_shared(shared) + self.add_routed(routed)


def mlp_of(spec: ModelSpec, layer: int, shard: ModelShard) -> nn.Module:
    """The MLP of a layer."""
    shape = spec.shape
    if layer in shape.dense_layers:
        return DenseMlp(spec, shard, "dense_")
    if not shape.num_experts:
        return DenseMlp(spec, shard)
    if spec.dense_beside:
        return DenseBesideMlp(spec, shard)
    if spec.gate == "sparsemixer":
        return SparseMixerMlp(spec, shard)
    return SharedMoeMlp(spec, shard) if shape.shared_size else MoeMlp(spec, shard)
