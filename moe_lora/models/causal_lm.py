# SPDX-License-Identifier: Apache-2.0
"""A stack of decoder layers between an embedding and a vocabulary head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops
from moe_lora.kernels.operands import Rotation

from .quantised_weight import QuantisedWeight


def site_index(shape: ModelShape, name: str) -> int:
    """Number of the site in operations."""
    return next(i for i, site in enumerate(shape.sites) if site.name == name)


def parameter(*size: int) -> nn.Parameter:
    """An uninitialised weight that the loader fills."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


def linear(
    x: torch.Tensor, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight.T + bias, for a plain or quantised weight."""
    if isinstance(weight, QuantisedWeight):
        return weight.multiply(x, bias)
    return ops.linear(x, weight, bias)


def site_linear(
    channel: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    bias: torch.Tensor | None,
    ids_TK: torch.Tensor | None,
    site: int,
    first_expert: int,
) -> torch.Tensor:
    """Base layer and deltas of a site in one operation."""
    rest = (bias, ids_TK, site, first_expert)
    if isinstance(weight, QuantisedWeight):
        held = (weight.data, weight.scale, weight.zero)
        return ops.lora_linear(channel, x, *held, *rest, weight.form_text, weight.num_out)
    return ops.lora_linear(channel, x, weight, None, None, *rest, "", weight.shape[-2])


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
        if ops.fuses_sites(x):
            return site_linear(channel, x, self.weight, self.bias, None, self.site, 0)
        ops.lora_begin(channel, x, None, self.site)
        y = linear(x, self.weight, self.bias)
        ops.lora_add_to(channel, y, x, self.site)
        return y


class ExpertLinear(nn.Module):
    """As `LoraLinear`, once per expert: row t*K + k of y is computed by expert ids[t, k].

    experts: local experts, in the order of the weight's first dim.
    """

    weight: nn.Parameter | QuantisedWeight

    def __init__(self, shape: ModelShape, site_name: str, experts: range, *, bias: bool) -> None:
        super().__init__()
        self.site = site_index(shape, site_name)
        site = shape.sites[self.site]
        self.experts = experts
        self.weight = parameter(len(experts), site.total_out_features, site.in_features)
        self.bias = parameter(len(experts), site.total_out_features) if bias else None

    def forward(
        self, x: torch.Tensor, ids_TK: torch.Tensor, channel: torch.Tensor, order: torch.Tensor | None
    ) -> torch.Tensor:
        """ids: local experts, or -1 for rows with output 0.  order: `MoeMlp.choose`'s."""
        if ops.fuses_sites(x):
            return site_linear(channel, x, self.weight, self.bias, ids_TK, self.site, self.experts.start)
        ops.lora_begin(channel, x, ids_TK, self.site)
        rows_TK = numbered_from(self.experts.start, ids_TK)
        if isinstance(self.weight, QuantisedWeight):
            y = self.weight.multiply(x, self.bias, rows_TK)
        else:
            y = ops.expert_linear(x, self.weight, self.bias, rows_TK, order)
        ops.lora_add_to(channel, y, x, self.site)
        return y

    def gated(
        self,
        x: torch.Tensor,
        ids_TK: torch.Tensor,
        channel: torch.Tensor,
        order: torch.Tensor | None,
        activation: str,
        limit: float,
    ) -> torch.Tensor:
        """`glu` of `forward`; a single operation if an order is given."""
        if order is None or isinstance(self.weight, QuantisedWeight):
            return glu(self(x, ids_TK, channel, order), activation, limit)
        ops.lora_begin(channel, x, ids_TK, self.site)
        rows_TK = numbered_from(self.experts.start, ids_TK)
        weights = (self.weight, self.bias, rows_TK, order)
        how = (activation != "silu", limit, self.site, self.experts.start)
        return ops.gated_expert_linear(channel, x, *weights, *how)


def numbered_from(first: int, ids_TK: torch.Tensor) -> torch.Tensor:
    """The ids with `first` as number 0; -1 stays."""
    return torch.where(ids_TK < 0, ids_TK, ids_TK - first) if first else ids_TK


def has_bias(shard: ModelShard, site_name: str) -> bool:
    """The first rank adds the bias to a sum over ranks."""
    return shard.dist_rank == 0 or not shard.is_summed(shard.whole.site(site_name))


def glu(y: torch.Tensor, activation: str, limit: float) -> torch.Tensor:
    """Gated activation of the fused [rows, 2F] output of gate and up -> [rows, F]."""
    gate, up = y.float().chunk(2, dim=-1)
    if activation == "silu":
        return (F.silu(gate) * up).to(y.dtype)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(y.dtype)


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


class Norm(nn.Module):
    """RMS norm or bias-free layer norm over the last dim, computed in fp32."""

    def __init__(self, size: int, spec: ModelSpec, *, kind: str | None = None) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = spec.norm_eps
        self.centred = (kind or spec.norm) == "layer"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.norm(x, self.weight, self.eps, self.centred)


class Attention(nn.Module):
    """Grouped-query attention over the paged KV behind the channel.  spec: sizes of the shard."""

    def __init__(self, spec: ModelSpec, layer: int, shard: ModelShard) -> None:
        super().__init__()
        shape = spec.shape
        self.qkv = LoraLinear(shape, "qkv", bias=spec.attention_bias)
        self.o = LoraLinear(shape, "o", bias=spec.attention_bias and has_bias(shard, "o"))
        self.is_summed = shard.tensor_parallel > 1
        self.q_norm = Norm(shape.head_dim, spec, kind="rms") if spec.qk_norm else None
        self.k_norm = Norm(shape.head_dim, spec, kind="rms") if spec.qk_norm else None
        self.sinks = parameter(shape.num_heads) if spec.sinks else None
        self.num_kv_heads = shape.num_kv_heads
        self.eps = spec.norm_eps
        self.clip = spec.clip_qkv
        self.window = spec.window[layer]
        self.scale = shape.head_dim**-0.5

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.qkv(x, channel)
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        rotation = Rotation(cos, sin, q_weight, k_weight, self.eps, self.clip)
        how = (self.num_kv_heads, self.sinks, self.scale, self.window)
        out_TND = ops.rotary_attention(channel, qkv, rotation, *how)
        y = self.o(out_TND.flatten(1), channel)
        if self.is_summed:
            ops.sum_over_ranks(channel, y)
        return y


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  spec: sizes of the shard."""

    def __init__(self, spec: ModelSpec, layer: int, shard: ModelShard) -> None:
        super().__init__()
        self.attention_norm = Norm(spec.shape.hidden_size, spec)
        self.attention = Attention(spec, layer, shard)
        self.mlp_norm = Norm(spec.shape.hidden_size, spec)
        self.mlp = MoeMlp(spec, shard) if spec.shape.num_experts else DenseMlp(spec, shard)

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

    spec: of the whole model; `self.spec` has the shard's sizes.  shard: None: the whole model.
    """

    inverse_frequencies: torch.Tensor
    head: nn.Parameter | QuantisedWeight

    def __init__(self, spec: ModelSpec, shard: ModelShard | None = None) -> None:
        super().__init__()
        self.shard = shard = ModelShard(spec.shape) if shard is None else shard
        self.spec = spec = replace(spec, shape=shard.shape)
        shape, self.experts = spec.shape, shard.experts
        self.embedding = parameter(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, shard) for i in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, spec)
        self.head = (
            self.own_head(self.embedding)
            if spec.tie_word_embeddings
            else parameter(len(shard.vocabulary), shape.hidden_size)
        )

    def own_head(self, embedding: nn.Parameter) -> nn.Parameter:
        """This shard's head: rows of a tied embedding, in the embedding's memory."""
        rows = self.shard.vocabulary
        if len(rows) == len(embedding):
            return embedding
        return nn.Parameter(embedding[rows.start : rows.stop], requires_grad=False)

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each row's rotation: [T, head_dim / 2] fp32."""
        angle = positions.float().unsqueeze(1) * self.inverse_frequencies
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
        """Logits [len(logit_rows), vocab] fp32; with a divided head at rank 0 only, elsewhere undefined.

        tokens, positions: [T] int64.  live: [T] bool, False for padding.  logit_rows: rows that need
        logits. layer_forward: runs a layer (compiled or eager).
        """
        cos, sin = self.rope(positions)
        x = F.embedding(tokens, self.embedding)
        for layer, channel in zip(self.layers, channels, strict=True):
            x = layer_forward(layer, x, channel, cos, sin, live)
        logits = linear(self.norm(x.index_select(0, logit_rows)), self.head, None)
        if self.shard.tensor_parallel > 1:
            logits = ops.gather_logits(channels[0], logits, self.spec.shape.vocab_size)
        return logits.float()
