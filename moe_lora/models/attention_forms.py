# SPDX-License-Identifier: Apache-2.0
"""Forms of token mixing: latent attention, heads of two sizes, Gated DeltaNet.

Legend: T token rows, N heads (value heads of a DeltaNet), M KV heads, P size of a head without rotation, R
rotated dims, C width of the latent or channels of the convolution, W its width, D size of a head, V size of a
value head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops
from moe_lora.kernels.reference import rotate

from .linear import ExpertLinear, Fp32Vector, LoraLinear, parameter

LATENT_EPS = 1e-6
"""Of the latents' norms, whatever rms_norm_eps is."""


class LatentAttention(nn.Module):
    """o(V_n(softmax(scale * (K_n(q_n) c + rotated q_n k)) c)) of each head n over latents c and rotated k.

    The pages hold c and k, as K and as V of one KV head.  kv_b_proj's K part acts on the query, the V part on
    the output.  Each row needs only its own adapter's delta.  Source: DeepSeek-V2 (arXiv 2405.04434), section
    2.1.2, the absorbed form.
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
        return self.q_b(ops.norm(self.q_a(x, channel), self.q_a_norm, LATENT_EPS, False, None), channel)

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


def unit_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm without a weight, over the last dim, in fp32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class HeadNorm(nn.Module):
    """The weight [D] of a norm of heads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = parameter(size)


class SizedAttention(nn.Module):
    """o(softmax(norm(q) @ norm(k)) norm(v)) of a layer's heads, q and k rotated after the norm.

    Heads have one size in layers with a window, another in full layers.  V is k_proj's output where the site
    has no v.  cos and sin have the columns of the layers with a window first.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        shape, sizes = spec.shape, spec.shape.global_heads
        assert sizes is not None
        is_global, first = layer in sizes.layers, shape.head_dim // 2
        self.qkv = LoraLinear(shape, sizes.qkv_site if is_global else "qkv", bias=False)
        self.o = LoraLinear(shape, "global_o" if is_global else "o", bias=False)
        self.head_dim = sizes.head_dim if is_global else shape.head_dim
        self.columns = slice(first, first + sizes.head_dim // 2) if is_global else slice(0, first)
        num_kv, num_modules = (
            (sizes if is_global else shape).num_kv_heads,
            2 + (not (is_global and sizes.k_is_v)),
        )
        self.num_heads = [shape.num_heads, *[num_kv] * (num_modules - 1)]
        self.q_norm, self.k_norm = HeadNorm(self.head_dim), HeadNorm(self.head_dim)
        self.eps, self.window = spec.norm_eps, spec.window[layer]

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        heads = self.qkv(x, channel).unflatten(1, (-1, self.head_dim)).split(self.num_heads, dim=1)
        q_TND, k_TMD, v_TMD = heads[0], heads[1], heads[-1]
        cos, sin = cos[:, self.columns], sin[:, self.columns]
        q_TND = rotate(ops.norm(q_TND, self.q_norm.weight, self.eps, False, None), cos, sin)
        k_TMD = rotate(ops.norm(k_TMD, self.k_norm.weight, self.eps, False, None), cos, sin)
        v_TMD = unit_norm(v_TMD, self.eps)
        y_TND = ops.paged_attention(channel, q_TND, k_TMD, v_TMD, None, 1.0, self.window)
        return self.o(y_TND.flatten(1), channel)


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
        how = (torch.sigmoid(b_TN.float()), self.conv, self.sizes.v_dim)
        heads_TNV = ops.delta_rule(channel, qkv_TC, log_decay_TN, *how)
        normed = ops.norm(heads_TNV, self.gated_norm, self.eps, False, None)
        return self.out((normed.float() * F.silu(z_TNV.float())).to(x.dtype).flatten(1), channel)

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
