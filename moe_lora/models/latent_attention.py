# SPDX-License-Identifier: Apache-2.0
"""Multi-head Latent Attention: all heads read one cached latent per token.

kv_b_proj makes K and V of a head from the latent.  Here its K part acts on the query, and its V part on the
attention's output, so each row needs its own adapter's delta alone and K and V are never made.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, the absorbed form.

Legend: T token rows, N heads, P size of a head without rotation, R rotated dims, C width of the latent.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops
from moe_lora.kernels.reference import rotate

from .linear import ExpertLinear, LoraLinear, parameter

LATENT_EPS = 1e-6
"""Of the norms of both latents, whatever rms_norm_eps is."""


class LatentAttention(nn.Module):
    """o(V_n(softmax(scale * (K_n(q_n) c + rotated q_n k)) c)) of each head n over latents c and rotated k.

    The pages behind the channel hold c and k, as K and as V of one KV head.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        shape, sizes = spec.shape, spec.shape.mla
        assert sizes is not None
        self.sizes, self.num_heads, self.neighbours = sizes, shape.num_heads, spec.rotates_neighbours
        bias, heads = spec.attention_bias, range(shape.num_heads)
        if sizes.q_rank:
            self.q_a = LoraLinear(shape, "q_a", bias=bias)
            self.q_a_norm = parameter(sizes.q_rank)
            self.q_b = LoraLinear(shape, "q_b", bias=False)
        else:
            self.q = LoraLinear(shape, "q", bias=False)
        self.kv_a = LoraLinear(shape, "kv_a", bias=bias)
        self.kv_a_norm = parameter(sizes.kv_rank)
        self.latent_k = ExpertLinear(shape, "latent_k", heads, bias=False)
        self.latent_v = ExpertLinear(shape, "latent_v", heads, bias=False)
        self.o = LoraLinear(shape, "o", bias=bias)
        scale = spec.attention_multiplier
        self.scale = (sizes.nope_dim + sizes.rope_dim) ** -0.5 if scale is None else scale

    def queries(self, x: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        """q of all heads: [T, N * (P + R)]."""
        if not self.sizes.q_rank:
            return self.q(x, channel)
        latent = ops.norm(self.q_a(x, channel), self.q_a_norm, LATENT_EPS, False, None)
        return self.q_b(latent, channel)

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        sizes, num_heads = self.sizes, self.num_heads
        q_TNP, q_TNR = (
            self.queries(x, channel)
            .unflatten(1, (num_heads, -1))
            .split_with_sizes([sizes.nope_dim, sizes.rope_dim], dim=2)
        )
        latent, k_TR = self.kv_a(x, channel).split([sizes.kv_rank, sizes.rope_dim], dim=1)
        c_TC = ops.norm(latent, self.kv_a_norm, LATENT_EPS, False, None)
        turned = rotate(torch.cat([q_TNR, k_TR.unsqueeze(1)], 1), cos, sin, self.neighbours)
        heads_TN = torch.arange(num_heads, dtype=torch.int32, device=x.device).repeat(len(x), 1)
        q_TNC = self.latent_k(q_TNP.flatten(0, 1), heads_TN, channel, None).unflatten(0, (-1, num_heads))
        q = torch.cat([q_TNC, turned[:, :num_heads]], 2)
        k = torch.cat([c_TC, turned[:, num_heads]], 1).unsqueeze(1)
        sums = ops.paged_attention(channel, q, k, k, None, self.scale, 0)
        sums_C = sums[..., : sizes.kv_rank].flatten(0, 1).contiguous()
        return self.o(self.latent_v(sums_C, heads_TN, channel, None).view(len(x), -1), channel)
