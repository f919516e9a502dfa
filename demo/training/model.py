# SPDX-License-Identifier: Apache-2.0
"""Mixtral's forward pass as plain functions over a dict of weights, quick on one CPU core.

The dict makes LoRA easy: the trainer passes base + delta in place of the base weights. Only real
tokens are computed (no padding outside attention), and products run in bf16 when asked.
Legend: N tokens, D hidden, F expert hidden, E experts, K top-k, B questions, L longest question.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Batch
from .vocabulary import VOCAB_SIZE

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class DemoShape:
    """Sizes of the demo model; the defaults give 1.8 M parameters."""

    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    top_k: int = 2
    expert_hidden: int = 128
    max_positions: int = 256
    rope_theta: float = 1000.0
    norm_eps: float = 1e-5


SHAPE = DemoShape()
_ROW_MULTIPLE = 128


def initial_weights(seed: int, shape: DemoShape = SHAPE) -> Weights:
    """Random fp32 weights; gate_up is [E, 2F, D] (gate rows first) and down [E, D, F]."""
    generator = torch.Generator().manual_seed(seed)
    hidden, expert_hidden, num_experts = shape.hidden_size, shape.expert_hidden, shape.num_experts
    kv_size = shape.num_kv_heads * shape.head_dim

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(size, generator=generator) * std

    weights = {"embed": normal(VOCAB_SIZE, hidden, std=0.5), "norm": torch.ones(hidden)}
    weights["head"] = normal(VOCAB_SIZE, hidden, std=0.02)
    deep = (2 * shape.num_layers) ** -0.5
    for n in range(shape.num_layers):
        layer = {
            "norm_1": torch.ones(hidden),
            "norm_2": torch.ones(hidden),
            "q": normal(hidden, hidden, std=hidden**-0.5),
            "k": normal(kv_size, hidden, std=hidden**-0.5),
            "v": normal(kv_size, hidden, std=hidden**-0.5),
            "o": normal(hidden, hidden, std=deep * hidden**-0.5),
            "gate": normal(num_experts, hidden, std=0.02),
            "gate_up": normal(num_experts, 2 * expert_hidden, hidden, std=hidden**-0.5),
            "down": normal(num_experts, hidden, expert_hidden, std=deep * expert_hidden**-0.5),
        }
        weights |= {f"{n}.{name}": tensor for name, tensor in layer.items()}
    return weights


def _norm(x_ND: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x_ND * torch.rsqrt(x_ND.pow(2).mean(-1, keepdim=True) + eps) * weight


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ weight.T. Rows are padded to few distinct counts: oneDNN compiles bf16 products per shape."""
    num_rows = len(x)
    if dtype != torch.float32:
        x = F.pad(x.to(dtype), (0, 0, 0, -num_rows % _ROW_MULTIPLE))
    return F.linear(x, weight.to(dtype))[:num_rows]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout. x: [N, heads, head_dim]; cos, sin: [N, 1, head_dim / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _attention(
    weights: Weights,
    n: int,
    x_ND: Tensor,
    batch: Batch,
    angles: tuple[Tensor, Tensor],
    shape: DemoShape,
    dtype,
) -> Tensor:
    def heads(name: str, num_heads: int) -> Tensor:
        return _linear(x_ND, weights[f"{n}.{name}"], dtype).float().view(-1, num_heads, shape.head_dim)

    def padded(x: Tensor) -> Tensor:
        out = x.new_zeros(batch.num_questions, batch.max_length, *x.shape[1:])
        out = out.index_put((batch.questions, batch.positions), x).transpose(1, 2)
        return out.repeat_interleave(shape.num_heads // x.shape[1], dim=1)

    q = _rotate(heads("q", shape.num_heads), *angles)
    k = _rotate(heads("k", shape.num_kv_heads), *angles)
    v = heads("v", shape.num_kv_heads)
    # Questions are padded on the right, so that the causal mask hides the padding. Written out in
    # fp32: at these lengths the fused kernel is slower, and its bf16 backward by ten times.
    scores = padded(q * shape.head_dim**-0.5) @ padded(k).transpose(-1, -2)
    future = torch.ones(batch.max_length, batch.max_length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ padded(v)
    mixed_ND = mixed.transpose(1, 2)[batch.questions, batch.positions].flatten(1)
    return _linear(mixed_ND, weights[f"{n}.o"], dtype).float()


def _experts(weights: Weights, n: int, x_ND: Tensor, shape: DemoShape, dtype) -> tuple[Tensor, Tensor]:
    """(top-k mix of the experts [N, D], load-balance loss: 1 when all experts are used alike)."""
    probs_NE = F.linear(x_ND, weights[f"{n}.gate"]).softmax(-1)
    share_NK, chosen_NK = probs_NE.topk(shape.top_k, dim=-1)
    share_NK = share_NK / share_NK.sum(-1, keepdim=True)
    counts = torch.bincount(chosen_NK.flatten(), minlength=shape.num_experts)
    balance = shape.num_experts * (counts / counts.sum() * probs_NE.mean(0)).sum()

    order = chosen_NK.flatten().argsort(stable=True)
    rows = order // shape.top_k
    gate_up, down = weights[f"{n}.gate_up"].to(dtype), weights[f"{n}.down"].to(dtype)
    outputs = []
    for e, x_eD in enumerate(x_ND[rows].split(counts.tolist())):
        gate, up = _linear(x_eD, gate_up[e], dtype).chunk(2, dim=-1)
        outputs.append(_linear(F.silu(gate) * up, down[e], dtype))
    y = torch.cat(outputs).float() * share_NK.flatten()[order, None]
    return torch.zeros_like(x_ND).index_add(0, rows, y), balance


def forward(
    weights: Weights, batch: Batch, shape: DemoShape = SHAPE, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(logits [len(batch.asked), vocabulary] fp32, mean load-balance loss over layers).

    dtype: of the big products; norms, gate, softmax and residual stay fp32.
    Equals transformers' MixtralForCausalLM (softmax over all experts, top-k, renormalised).
    """
    steps = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = batch.positions[:, None, None] * shape.rope_theta**-steps
    cos_sin = (angles.cos(), angles.sin())
    x_ND = weights["embed"][batch.tokens]
    balances = []
    for n in range(shape.num_layers):
        normed = _norm(x_ND, weights[f"{n}.norm_1"], shape.norm_eps)
        x_ND = x_ND + _attention(weights, n, normed, batch, cos_sin, shape, dtype)
        normed = _norm(x_ND, weights[f"{n}.norm_2"], shape.norm_eps)
        mixed, balance = _experts(weights, n, normed, shape, dtype)
        x_ND = x_ND + mixed
        balances.append(balance)
    logits = _linear(_norm(x_ND[batch.asked], weights["norm"], shape.norm_eps), weights["head"], dtype)
    return logits.float(), torch.stack(balances).mean()
