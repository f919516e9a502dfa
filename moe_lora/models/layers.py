"""One decoder layer for every family.

Legend: T token rows, H hidden size, N heads, M kv heads, D head_dim, F inner size.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_lora.kernels import ops

from .linear import LoraLinear, parameter
from .mlp import DenseMlp, MoeMlp
from .spec import ModelSpec


class Norm(nn.Module):
    """RMS norm or bias-free layer norm over the last dim, computed in fp32."""

    def __init__(self, size: int, spec: ModelSpec, *, kind: str | None = None) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = spec.norm_eps
        self.centred = (kind or spec.norm) == "layer"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        if self.centred:
            x32 = x32 - x32.mean(-1, keepdim=True)
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight.float()).to(x.dtype)


def rotate(x_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the two halves of head_dim.  cos, sin: [T, D / 2] fp32."""
    first, second = x_TND.float().chunk(2, dim=-1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_TND.dtype)


class Attention(nn.Module):
    """Grouped-query attention over the paged KV behind the channel."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        shape = spec.shape
        self.qkv = LoraLinear(shape, "qkv", bias=spec.qkv_bias)
        self.o = LoraLinear(shape, "o", bias=spec.o_bias)
        self.q_norm = Norm(shape.head_dim, spec, kind="rms") if spec.qk_norm else None
        self.k_norm = Norm(shape.head_dim, spec, kind="rms") if spec.qk_norm else None
        self.sinks = parameter(shape.num_heads) if spec.sinks else None
        self.heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.head_dim = shape.head_dim
        self.clip = spec.clip_qkv
        self.window = spec.window[layer]
        self.scale = shape.head_dim**-0.5

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.qkv(x, channel)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        q_TND, k_TMD, v_TMD = qkv.view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TND, k_TMD = self.q_norm(q_TND), self.k_norm(k_TMD)
        q_TND, k_TMD = rotate(q_TND, cos, sin), rotate(k_TMD, cos, sin)
        out_TND = ops.paged_attention(channel, q_TND, k_TMD, v_TMD, self.sinks, self.scale, self.window)
        return self.o(out_TND.flatten(1), channel)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  experts: those whose weights are held here."""

    def __init__(self, spec: ModelSpec, layer: int, experts: range) -> None:
        super().__init__()
        self.attention_norm = Norm(spec.shape.hidden_size, spec)
        self.attention = Attention(spec, layer)
        self.mlp_norm = Norm(spec.shape.hidden_size, spec)
        self.mlp = MoeMlp(spec, experts) if spec.shape.num_experts else DenseMlp(spec)

    def forward(
        self,
        x: torch.Tensor,
        channel: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        live: torch.Tensor,
    ) -> torch.Tensor:
        """x: [T, H].  cos, sin: [T, head_dim / 2] fp32.  live: [T] bool, False for padding rows."""
        x = x + self.attention(self.attention_norm(x), channel, cos, sin)
        return x + self.mlp(self.mlp_norm(x), channel, live)
