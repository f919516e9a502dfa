# SPDX-License-Identifier: Apache-2.0
"""Attention with heads of one size in layers with a window, and of another size in layers of full attention.

Legend: T token rows, N query heads, M KV heads, D size of a head.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops
from moe_lora.kernels.reference import rotate

from .linear import LoraLinear, parameter


def unit_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm without a weight, over the last dim; computed in fp32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class HeadNorm(nn.Module):
    """The weight [D] of a norm of heads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = parameter(size)


class SizedAttention(nn.Module):
    """o(softmax(norm(q) @ norm(k)) norm(v)) of a layer's heads, q and k rotated after the norm.

    V is the output of k_proj where the site has no v.  cos and sin have the columns of the layers with a
    window first, then those of the full layers.
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
