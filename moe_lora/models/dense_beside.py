# SPDX-License-Identifier: Apache-2.0
"""A dense MLP beside routed experts, each with norms of its own; the gate has a norm, experts have scales.

Legend: T token rows, K chosen experts, E experts, H hidden size.
"""

from __future__ import annotations

import torch

from moe_lora.core.shard import ModelShard
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops

from .causal_lm import Add, Norm, NormedAdd
from .linear import parameter
from .mlp import DenseMlp, MoeMlp


class DenseBesideMlp(MoeMlp):
    """norm(dense(norm(x))) + norm(experts(norm(x))), with experts chosen by norm(x) / sqrt(H).

    The weight of a chosen expert is multiplied by the expert's scale.  x: without a norm of the layer.
    """

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
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
        """As `MoeMlp.choose`."""
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


class ScaledNormedAdd(NormedAdd):
    """`NormedAdd` times a scale of the layer."""

    def __init__(self, spec: ModelSpec, add: Add) -> None:
        super().__init__(spec, add)
        self.scale = parameter(1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * self.scale
