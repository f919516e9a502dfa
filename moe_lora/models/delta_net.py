# SPDX-License-Identifier: Apache-2.0
"""A Gated DeltaNet layer in place of attention: a state of fixed size replaces KV.

Legend: T token rows, C channels of the convolution, W its width, N value heads, V size of a value head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops

from .linear import Fp32Vector, LoraLinear, parameter


class DeltaNet(nn.Module):
    """out(norm(heads) * silu(z)), with heads of the gated delta rule over silu(conv(q, k, v)).

    The state of each sequence lies behind the channel.  Source: Gated DeltaNet (arXiv 2412.06464).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        shape, sizes = spec.shape, spec.shape.delta
        assert sizes is not None
        self.sizes, self.eps = sizes, spec.norm_eps
        self.qkvz = LoraLinear(shape, "delta_qkvz", bias=False)
        self.ba = LoraLinear(shape, "delta_ba", bias=False)
        self.out = LoraLinear(shape, "delta_out", bias=False)
        self.conv = parameter(sizes.conv_size, sizes.conv_width)
        self.decay = Fp32Vector(sizes.num_v_heads)
        self.time_bias = Fp32Vector(sizes.num_v_heads)
        self.gated_norm = parameter(sizes.v_dim)

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        qkv_TC, z_TNV, b_TN, a_TN = self.parts(self.qkvz(x, channel), self.ba(x, channel))
        log_decay_TN = -self.decay.weight.exp() * F.softplus(a_TN.float() + self.time_bias.weight)
        how = (torch.sigmoid(b_TN.float()), self.conv, self.sizes.num_k_heads, self.sizes.v_dim)
        heads_TNV = ops.delta_rule(channel, qkv_TC, log_decay_TN, *how)
        normed = ops.norm(heads_TNV, self.gated_norm, self.eps, False, None)
        gated = (normed.float() * F.silu(z_TNV.float())).to(x.dtype)
        return self.out(gated.flatten(1), channel)

    def parts(self, qkvz: torch.Tensor, ba: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v [T, C] by kind, then by head; z [T, N, V]; b and a [T, N]."""
        sizes = self.sizes
        if not sizes.is_interleaved:
            qkv, z = qkvz.split([sizes.conv_size, sizes.value_size], dim=1)
            return qkv, z.unflatten(1, (-1, sizes.v_dim)), *ba.chunk(2, dim=1)
        share = sizes.num_v_heads // sizes.num_k_heads
        widths = [sizes.k_dim, sizes.k_dim, share * sizes.v_dim, share * sizes.v_dim]
        *qkv_parts, z = qkvz.unflatten(1, (sizes.num_k_heads, -1)).split(widths, dim=2)
        b, a = ba.unflatten(1, (sizes.num_k_heads, -1)).chunk(2, dim=2)
        qkv = torch.cat([part.flatten(1) for part in qkv_parts], dim=1)
        return qkv, z.flatten(1).unflatten(1, (-1, sizes.v_dim)), b.flatten(1), a.flatten(1)
