"""A stack of decoder layers between an embedding and a vocabulary head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.core.shape import ModelShape
from moe_lora.kernels import ops

from .quantised_weight import QuantisedWeight
from .spec import ModelSpec

# The linear layers that LoRA sites are made of.
#
# Legend: T token rows, H hidden size, E experts, K experts per token.
#
# A LoRA site is always the same three lines: begin, base GEMM, add_to.  Site numbers index
# `ModelShape.sites`.


def site_index(shape: ModelShape, name: str) -> int:
    """Number by which operations know the site."""
    return next(i for i, site in enumerate(shape.sites) if site.name == name)


def parameter(*size: int) -> nn.Parameter:
    """An uninitialised weight that the loader fills."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


def linear(
    x: torch.Tensor, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight.T + bias, whichever way the weight is held."""
    if isinstance(weight, QuantisedWeight):
        return weight.multiply(x, bias)
    return ops.linear(x, weight, bias)


class LoraLinear(nn.Module):
    """y = x @ weight.T + bias + deltas, for all modules of one dense site at once."""

    weight: nn.Parameter | QuantisedWeight

    def __init__(self, shape: ModelShape, site_name: str, *, bias: bool) -> None:
        super().__init__()
        self.site = site_index(shape, site_name)
        site = shape.sites[self.site]
        self.weight = parameter(site.total_out_features, site.in_features)
        self.bias = parameter(site.total_out_features) if bias else None

    def forward(self, x: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        ticket = ops.lora_begin(channel, x, None, self.site)
        y = linear(x, self.weight, self.bias)
        ops.lora_add_to(channel, ticket, y)
        return y


class ExpertLinear(nn.Module):
    """As `LoraLinear`, once per expert: row t*K + k of y is computed by expert ids[t, k].

    experts: those whose weights are held here, in the order of the weight's first dim.
    """

    weight: nn.Parameter | QuantisedWeight

    def __init__(self, shape: ModelShape, site_name: str, experts: range, *, bias: bool) -> None:
        super().__init__()
        self.site = site_index(shape, site_name)
        site = shape.sites[self.site]
        self.experts = experts
        self.weight = parameter(len(experts), site.total_out_features, site.in_features)
        self.bias = parameter(len(experts), site.total_out_features) if bias else None

    def forward(self, x: torch.Tensor, ids_TK: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        """ids: experts held here, -1 for rows without one, whose output is zero."""
        ticket = ops.lora_begin(channel, x, ids_TK, self.site)
        first = self.experts.start
        rows_TK = torch.where(ids_TK < 0, ids_TK, ids_TK - first) if first else ids_TK
        if isinstance(self.weight, QuantisedWeight):
            y = self.weight.multiply(x, self.bias, rows_TK)
        else:
            y = ops.expert_linear(x, self.weight, self.bias, rows_TK)
        ops.lora_add_to(channel, ticket, y)
        return y


# The second half of a decoder layer: a dense MLP, or a choice of experts.
#
# Legend: T token rows, E experts, K experts per token, F expert (or dense) inner size.


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


# One decoder layer for every family.
#
# Legend: T token rows, H hidden size, N heads, M kv heads, D head_dim, F inner size.


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
        self.qkv = LoraLinear(shape, "qkv", bias=spec.attention_bias)
        self.o = LoraLinear(shape, "o", bias=spec.attention_bias)
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


LayerForward = Callable[..., torch.Tensor]


class CausalLM(nn.Module):
    """Token ids in, logits of chosen rows out; attention state lies behind the channels.

    experts: those of each layer whose weights are held here, None = all.
    """

    inverse_frequencies: torch.Tensor
    head: nn.Parameter | QuantisedWeight

    def __init__(self, spec: ModelSpec, experts: range | None = None) -> None:
        super().__init__()
        shape = spec.shape
        self.spec = spec
        self.experts = range(shape.num_experts) if experts is None else experts
        self.embedding = parameter(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, self.experts) for i in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, spec)
        self.head = (
            self.embedding if spec.tie_word_embeddings else parameter(shape.vocab_size, shape.hidden_size)
        )

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each row's rotation: [T, head_dim / 2] fp32."""
        angle = positions.float()[:, None] * self.inverse_frequencies
        factor = self.spec.rope.attention_factor
        return angle.cos() * factor, angle.sin() * factor

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        live: torch.Tensor,
        logit_rows: torch.Tensor,
        channels: Sequence[torch.Tensor],
        layer_forward: LayerForward = DecoderLayer.__call__,
    ) -> torch.Tensor:
        """Logits [len(logit_rows), vocab] fp32.

        tokens, positions: [T] int64.  live: [T] bool, False for padding.  logit_rows: rows that need logits.
        layer_forward: how a layer is run (compiled or not).
        """
        cos, sin = self.rope(positions)
        x = F.embedding(tokens, self.embedding)
        for layer, channel in zip(self.layers, channels, strict=True):
            x = layer_forward(layer, x, channel, cos, sin, live)
        return linear(self.norm(x[logit_rows]), self.head, None).float()
