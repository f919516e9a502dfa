# SPDX-License-Identifier: Apache-2.0
"""Decoder layers between an embedding and a vocabulary head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.core.shard import ModelShard
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import ops
from moe_lora.kernels.operands import Rotation

from .linear import LoraLinear, linear, parameter
from .mlp import has_bias, mlp_of
from .quantised_weight import QuantisedWeight

if TYPE_CHECKING:
    from moe_lora.lora.outer import OuterDeltas


Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Norm(nn.Module):
    """RMS norm, or layer norm with or without a bias, over the last dim, in fp32."""

    def __init__(self, size: int, spec: ModelSpec, *, kind: str | None = None) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = spec.norm_eps
        self.centred = (kind or spec.norm) == "layer"
        self.bias = parameter(size) if spec.norm_bias and self.centred else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.norm(x, self.weight, self.eps, self.centred, self.bias)


class OffsetNorm(Norm):
    """`Norm` with a weight in fp32: 1 + the stored weight."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> OffsetNorm:
        return super()._apply(lambda held: fn(held).float(), recurse)


def norm_of(size: int, spec: ModelSpec, *, kind: str | None = None) -> Norm:
    return (OffsetNorm if spec.norm_offset else Norm)(size, spec, kind=kind)


class NormedQkv(LoraLinear):
    """`LoraLinear` of q, k and v, then RMS norms over all heads of q and of k."""

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        shape = spec.shape
        super().__init__(shape, "qkv", bias=spec.attention_bias or spec.qkv_bias)
        self.widths = list(shape.sites[self.site].out_features)
        self.q_norm = Norm(self.widths[0], spec, kind="rms")
        self.k_norm = Norm(self.widths[1], spec, kind="rms")

    def forward(self, x: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        q, k, v = super().forward(x, channel).split(self.widths, dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)


class DividedNormedQkv(NormedQkv):
    """`NormedQkv` of a rank's heads.  Ranks add up sums of squares, each KV head once."""

    def __init__(self, spec: ModelSpec, shard: ModelShard) -> None:
        super().__init__(spec, shard)
        self.whole_widths = shard.whole.sites[self.site].out_features
        self.share_of_k = float(shard.owns_kv_heads)

    def forward(self, x: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        q, k, v = LoraLinear.forward(self, x, channel).split(self.widths, dim=1)
        sums = torch.stack([q.float().square().sum(1), k.float().square().sum(1) * self.share_of_k])
        ops.sum_over_ranks(channel, sums)
        q, k = (
            (y.float() * torch.rsqrt(total / width + norm.eps).unsqueeze(1) * norm.weight.float()).to(y.dtype)
            for y, total, width, norm in zip(
                (q, k), sums, self.whole_widths[:2], (self.q_norm, self.k_norm), strict=True
            )
        )
        return torch.cat([q, k, v], dim=1)


def qkv_linear(spec: ModelSpec, shard: ModelShard) -> LoraLinear:
    """The projection to q, k, v."""
    if not spec.full_qk_norm:
        return LoraLinear(spec.shape, "qkv", bias=spec.attention_bias or spec.qkv_bias)
    return (DividedNormedQkv if shard.tensor_parallel > 1 else NormedQkv)(spec, shard)


def rope_columns(spec: ModelSpec, layer: int) -> slice | None:
    """Columns of cos and sin for the layer; None: all."""
    half = len(spec.rope.inverse_frequencies) // 2
    return (slice(half) if spec.window[layer] else slice(half, None)) if spec.rope_by_window else None


class Attention(nn.Module):
    """Grouped-query attention over the channel's paged KV."""

    def __init__(self, spec: ModelSpec, layer: int, shard: ModelShard) -> None:
        super().__init__()
        shape = spec.shape
        self.qkv = qkv_linear(spec, shard)
        self.o = LoraLinear(shape, "o", bias=spec.attention_bias and has_bias(shard, "o"))
        self.is_summed = shard.tensor_parallel > 1
        self.q_norm = norm_of(shape.head_dim, spec, kind="rms") if spec.qk_norm else None
        self.k_norm = norm_of(shape.head_dim, spec, kind="rms") if spec.qk_norm else None
        self.sinks = parameter(shape.num_heads) if spec.sinks else None
        self.num_kv_heads = shape.num_kv_heads
        self.window = spec.window[layer]
        self.rotates = layer not in spec.unrotated
        self.columns = rope_columns(spec, layer)
        self.changes = (spec.norm_eps, spec.clip_qkv, shape.head_dim, spec.rotates_neighbours)
        self.scale = shape.head_dim**-0.5 if spec.attention_multiplier is None else spec.attention_multiplier
        if spec.rope_by_window and not self.window:
            self.scale *= spec.rope.full_factor**2

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return self.project(self.attend(self.qkv(x, channel), channel, cos, sin), channel)

    def attend(
        self, qkv: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of this rank's heads: [T, heads * head_dim]."""
        if not self.rotates:
            cos, sin = cos[:, :0], sin[:, :0]
        elif self.columns is not None:
            cos, sin = cos[:, self.columns].contiguous(), sin[:, self.columns].contiguous()
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        rotation = Rotation(cos, sin, q_weight, k_weight, *self.changes)
        how = (self.num_kv_heads, self.sinks, self.scale, self.window)
        return ops.rotary_attention(channel, qkv, rotation, *how).flatten(1)

    def project(self, heads: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        y = self.o(heads, channel)
        if self.is_summed:
            ops.sum_over_ranks(channel, y)
        return y


class GatedAttention(Attention):
    """`Attention` with heads' outputs scaled by the sigmoid of another projection."""

    def __init__(self, spec: ModelSpec, layer: int, shard: ModelShard) -> None:
        super().__init__(spec, layer, shard)
        self.gate = LoraLinear(spec.shape, "output_gate", bias=False)

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        heads = self.attend(self.qkv(x, channel), channel, cos, sin)
        return self.project(heads * torch.sigmoid(self.gate(x, channel)), channel)


class GatedQueries(Attention):
    """`Attention` with outputs scaled by sigmoid(gate); q's outputs are query and gate of each head."""

    def __init__(self, spec: ModelSpec, layer: int, shard: ModelShard) -> None:
        super().__init__(spec, layer, shard)
        self.head_dim, self.q_width = spec.shape.head_dim, 2 * spec.shape.num_heads * spec.shape.head_dim

    def forward(
        self, x: torch.Tensor, channel: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.qkv(x, channel)
        q, gate = qkv[:, : self.q_width].unflatten(1, (-1, 2, self.head_dim)).unbind(2)
        heads = self.attend(torch.cat([q.flatten(1), qkv[:, self.q_width :]], 1), channel, cos, sin)
        return self.project(heads * torch.sigmoid(gate.flatten(1)), channel)


def attention_of(spec: ModelSpec, layer: int, shard: ModelShard) -> nn.Module:
    """Attention, or Gated DeltaNet in its place."""
    shape = spec.shape
    if shape.global_heads is not None:
        from .attention_forms import SizedAttention

        return SizedAttention(spec, layer)
    if shape.mla is not None:
        from .attention_forms import LatentAttention

        return LatentAttention(spec)
    if not shape.is_recurrent(layer):
        kind = GatedAttention if shape.has_output_gate else GatedQueries if shape.gated_q else Attention
        return kind(spec, layer, shard)
    from .attention_forms import DeltaNet

    return DeltaNet(spec)


class NormedAdd(nn.Module):
    """x + scale * norm(y).  add: of the scale."""

    def __init__(self, spec: ModelSpec, add: Add) -> None:
        super().__init__()
        self.norm = norm_of(spec.shape.hidden_size, spec)
        self.add = add

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.add(x, self.norm(y))


class ScaledNormedAdd(NormedAdd):
    """`NormedAdd` times a scale of the layer."""

    def __init__(self, spec: ModelSpec, add: Add) -> None:
        super().__init__(spec, add)
        self.scale = parameter(1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * self.scale


class DecoderLayer(nn.Module):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x)); scale: residual_multiplier.

    With output norms, see `NormedAdd`; without input norms, norm(x) is x.
    """

    def __init__(self, spec: ModelSpec, layer: int, shard: ModelShard) -> None:
        super().__init__()
        self.attention_norm = norm_of(spec.shape.hidden_size, spec) if spec.input_norms else nn.Identity()
        self.attention = attention_of(spec, layer, shard)
        has_norm = spec.input_norms and not spec.dense_beside
        self.mlp_norm = norm_of(spec.shape.hidden_size, spec) if has_norm else nn.Identity()
        self.mlp = mlp_of(spec, layer, shard)
        scale = spec.residual_multiplier
        add: Add = torch.add if scale == 1 else partial(torch.add, alpha=scale)
        self.add_attention = NormedAdd(spec, add) if spec.output_norms else add
        self.add_mlp = NormedAdd(spec, add) if spec.output_norms else add
        if spec.dense_beside:
            self.add_mlp = ScaledNormedAdd(spec, add)

    def forward(
        self,
        x: torch.Tensor,
        channel: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        live: torch.Tensor,
    ) -> torch.Tensor:
        """x: [T, H].  cos, sin: [T, rotated dims / 2] fp32.  live: [T] bool, False for padding rows."""
        x = self.add_attention(x, self.attention(self.attention_norm(x), channel, cos, sin))
        return self.add_mlp(x, self.mlp(self.mlp_norm(x), channel, live))


LayerForward = Callable[..., torch.Tensor]


class CausalLM(nn.Module):
    """Token ids in, logits of chosen rows out; attention state lies behind the channels.

    spec: of the whole model; `self.spec` has the shard's sizes.
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
        self.norm = norm_of(shape.hidden_size, spec)
        self.embedding_multiplier, self.logits_divisor = spec.embedding_multiplier, spec.logits_divisor
        self.rounds_multiplier, self.logits_cap = spec.rounds_multiplier, spec.logits_cap
        self.head = (
            self.own_head(self.embedding)
            if spec.tie_word_embeddings
            else parameter(len(shard.vocabulary), shape.hidden_size)
        )
        self.head_bias = parameter(len(shard.vocabulary)) if spec.head_bias else None

    def own_head(self, embedding: nn.Parameter) -> nn.Parameter:
        """This shard's head: a tied embedding's rows, in place."""
        rows = self.shard.vocabulary
        if len(rows) == len(embedding):
            return embedding
        return nn.Parameter(embedding[rows.start : rows.stop], requires_grad=False)

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each row: [T, rotated dims / 2] fp32."""
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
        outer: OuterDeltas | None = None,
    ) -> torch.Tensor:
        """Logits [len(logit_rows), vocab] fp32; with a divided head at rank 0 only, elsewhere undefined.

        tokens, positions: [T] int64.  live: [T] bool, False for padding.  layer_forward: compiled or eager.
        outer: deltas of embedding and head.
        """
        cos, sin = self.rope(positions)
        x = F.embedding(tokens, self.embedding)
        if outer is not None:
            outer.add_to_embedding(x, tokens)
        if self.embedding_multiplier != 1:
            factor = self.embedding_multiplier
            x = x * (x.new_full((), factor) if self.rounds_multiplier else factor)
        for layer, channel in zip(self.layers, channels, strict=True):
            x = layer_forward(layer, x, channel, cos, sin, live)
        x = self.norm(x.index_select(0, logit_rows))
        logits = linear(x, self.head, self.head_bias)
        if outer is not None:
            outer.add_to_logits(logits, x)
        if self.shard.tensor_parallel > 1:
            logits = ops.gather_logits(channels[0], logits, self.spec.shape.vocab_size)
        logits = logits.float() if self.logits_divisor == 1 else logits.float() / self.logits_divisor
        cap = self.logits_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
