# SPDX-License-Identifier: Apache-2.0
"""The operations of a compiled step, registered with torch.library.

Operations on the arena or the LoRA tables take a channel: int64 [handle, layer, address of a `StepCalls` or
0], declared mutated: torch.compile then keeps the order begin < base GEMM < add_to and KV writes.  `begin`
also declares x mutated, and `add_to` names x to keep its memory.  On CPU `lora_linear` replaces the three.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from . import reference
from .cpu import cpu
from .cpu.site_linear import StepCalls
from .operands import Rotation
from .quantised import QuantisedOperand, format_named

_handlers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


def open_channels(handler: Any, num_layers: int, calls: StepCalls | None = None) -> list[torch.Tensor]:
    """A channel per layer, valid during the handler's life.

    calls: tables for C++.
    """
    handle = next(_next_handle)
    _handlers[handle] = handler
    address = 0 if calls is None else calls.address
    channels = [torch.tensor([handle, layer, address], dtype=torch.int64) for layer in range(num_layers)]
    views = [channel.numpy() for channel in channels]
    weakref.finalize(handler, _close_channels, views, calls).atexit = False
    return channels


def _close_channels(channels: list[np.ndarray], calls: StepCalls | None) -> None:
    """Clear the address before `calls` goes.

    May run during a trace by torch: calls no torch operation.
    """
    for channel in channels:
        channel[2] = 0


def _behind(channel: torch.Tensor) -> tuple[Any, int]:
    handle, layer, _ = channel.tolist()
    return _handlers[handle], layer


def _lora_begin(channel: torch.Tensor, x: torch.Tensor, ids: torch.Tensor | None, site: int) -> None:
    handler, layer = _behind(channel)
    handler.lora_begin(layer, site, x, ids)


def _lora_add_to(channel: torch.Tensor, y: torch.Tensor, x: torch.Tensor, site: int) -> None:
    handler, layer = _behind(channel)
    handler.lora_add_to(layer, site, y)


def _paged_attention(channel: torch.Tensor, *operands: Any) -> torch.Tensor:
    handler, layer = _behind(channel)
    return handler.paged_attention(layer, *operands)


def _rotary_attention(channel: torch.Tensor, qkv: torch.Tensor, *operands: Any) -> torch.Tensor:
    handler, layer = _behind(channel)
    num = len(Rotation._fields)
    return handler.rotary_attention(layer, qkv, Rotation(*operands[:num]), *operands[num:])


def _rotated_like(channel: torch.Tensor, qkv: torch.Tensor, *operands: Any) -> torch.Tensor:
    head_dim, _, num_kv_heads = operands[6:9]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)


def rotary_attention(
    channel: torch.Tensor,
    qkv: torch.Tensor,
    rotation: Rotation,
    num_kv_heads: int,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
) -> torch.Tensor:
    """`reference.paged_attention` of `reference.rotated_heads`: [T, heads, head_dim].

    On CUDA the write of K rotates; elsewhere the compiler sees the rotation.
    """
    if qkv.is_cuda:
        return torch.ops.moe_lora.rotary_attention(
            channel, qkv, *rotation, num_kv_heads, sinks, scale, window
        )
    q, k, v = reference.rotated_heads(qkv, num_kv_heads, rotation)
    return paged_attention(channel, q, k, v, sinks, scale, window)


def _delta_rule(channel: torch.Tensor, *operands: Any) -> torch.Tensor:
    handler, layer = _behind(channel)
    return handler.delta_rule(layer, *operands)


def _exchange_experts(channel: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
    _behind(channel)[0].exchange_experts(y, ids)


def _sum_over_ranks(channel: torch.Tensor, y: torch.Tensor) -> None:
    _behind(channel)[0].sum_over_ranks(y)


def _gather_logits(channel: torch.Tensor, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return _behind(channel)[0].gather_logits(logits, vocab_size)


def fuses_sites(x: torch.Tensor) -> bool:
    """True if a LoRA site is one operation, `lora_linear`, for low overhead."""
    return x.is_cpu


def _lora_linear(
    channel: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    site: int,
    first_expert: int,
    form: str,
    num_out: int,
) -> torch.Tensor:
    handler, layer = _behind(channel)
    held = weight if scale is None else QuantisedOperand(format_named(form), weight, scale, zero)
    return handler.lora_linear(layer, site, x, ids, held, bias, first_expert, num_out)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedOperand,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    num_out: int,
) -> torch.Tensor:
    """The linear layer of a site."""
    if isinstance(weight, QuantisedOperand):
        return _multiply_quantised(x, weight, bias, ids, num_out)
    return _linear(x, weight, bias) if ids is None else _expert_linear(x, weight, bias, ids)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias; on CPU our operation, else torch's."""
    multiply = torch.ops.moe_lora.linear if x.is_cpu else reference.linear
    return multiply(x, weight, bias)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.shape[0] <= cpu.LINEAR_MAX_ROWS[x.dtype]:
        return cpu.linear(x, weight, bias)
    return reference.linear(x, weight, bias)


def _expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    if order is not None:
        return _experts().linear(x, weight, bias, ids, order)
    if x.is_cpu:
        return cpu.expert_linear(x, weight, bias, ids)
    return reference.expert_linear(x, weight, bias, ids)


def _experts() -> Any:
    from moe_lora.kernels.triton.linear import experts

    return experts


def _choose_experts(
    channel: torch.Tensor,
    logits: torch.Tensor,
    live: torch.Tensor,
    correction: torch.Tensor | None,
    choice: Sequence[float],
    first_expert: int,
    num_held: int,
    site: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`experts.choose_and_order`.  choice: fields of `GateChoice`.  site: of LoRA rows to sort; -1: none."""
    handle, layer, _ = channel.tolist()
    handler, held = _handlers[handle], range(first_expert, first_expert + num_held)
    to_sort = None if site < 0 else partial(handler.rows_to_sort, layer, site, logits)
    experts = _experts()
    top_k, scores, norm, num_groups, top_groups, scale = choice
    how = experts.GateChoice(int(top_k), int(scores), norm, int(num_groups), int(top_groups), scale)
    return experts.choose_and_order(logits, live, how, correction, held, handler.zeros, to_sort)


def _gated_expert_linear(
    channel: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    order: torch.Tensor,
    clamped: bool,
    limit: float,
    site: int,
    first_expert: int,
) -> torch.Tensor:
    """first_expert: model number of id 0."""
    (handler, layer), experts = _behind(channel), _experts()
    gate = experts.Gate(clamped, limit)
    deltas = handler.deltas_before(layer, site) if experts.adds_deltas(ids, len(weight)) else None
    if deltas is not None:
        return experts.linear(x, weight, bias, ids, order, gate, deltas.from_expert(first_expert))
    if not handler.has_deltas(layer, site):
        return experts.linear(x, weight, bias, ids, order, gate)
    y = experts.linear(x, weight, bias, ids, order)
    handler.lora_add_to(layer, site, y)
    return experts.gate(y, gate)


def _sum_experts(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _experts().weighted_sum(y, weights)


def sum_experts(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`reference.sum_experts`, in torch's order on CPU.

    Under a compiler plain terms, to fuse with residual and norm.
    """
    if y.is_cpu:
        terms = y.view(*weights.shape, -1).float() * weights[..., None]
        return terms.sum(1).to(y.dtype)
    if torch.compiler.is_compiling():
        return reference.sum_experts(y, weights)
    return torch.ops.moe_lora.sum_experts(y, weights)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool, bias: torch.Tensor | None
) -> torch.Tensor:
    from .triton import norm

    return norm.norm(x, weight, eps, centred, bias)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`reference.norm`, outside a compiler by our kernel on a GPU."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return reference.norm(x, weight, eps, centred, bias)
    return torch.ops.moe_lora.norm(x, weight, eps, centred, bias)


def _quantised_linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    form: str,
    num_out: int,
) -> torch.Tensor:
    weight = QuantisedOperand(format_named(form), data, scale, zero)
    return _multiply_quantised(x, weight, bias, ids, num_out)


def _multiply_quantised(
    x: torch.Tensor,
    weight: QuantisedOperand,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    num_out: int,
) -> torch.Tensor:
    if x.is_cuda:
        from moe_lora.kernels.triton.linear import quantised_linear

        return quantised_linear.quantised_linear(x, weight, bias, ids, num_out)
    if ids is None and not weight.form.dynamic and x.shape[0] > cpu.QUANTISED_MAX_ROWS[x.dtype]:
        return reference.quantised_linear(x, weight, bias, ids, num_out)
    return cpu.quantised_linear(x, weight, bias, ids, num_out)


_library = torch.library.Library("moe_lora", "FRAGMENT")
_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lora_begin(Tensor(a!) channel, Tensor(b!) x, Tensor? ids, int site) -> ()": (
        _lora_begin,
        lambda *_: None,
    ),
    "lora_linear(Tensor(a!) channel, Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, "
    "Tensor? ids, int site, int first_expert, str form, int num_out) -> Tensor": (
        _lora_linear,
        lambda channel, x, weight, scale, zero, bias, ids, site, first_expert, form, num_out: x.new_empty(
            x.shape[0] if ids is None else ids.numel(), num_out
        ),
    ),
    "lora_add_to(Tensor(a!) channel, Tensor(b!) y, Tensor x, int site) -> ()": (
        _lora_add_to,
        lambda *_: None,
    ),
    "paged_attention(Tensor(a!) channel, Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, "
    "int window) -> Tensor": (
        _paged_attention,
        lambda channel, q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    ),
    "rotary_attention(Tensor(a!) channel, Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, "
    "Tensor? k_weight, float eps, float? clip, int head_dim, bool neighbours, int num_kv_heads, "
    "Tensor? sinks, float scale, int window) -> Tensor": (
        _rotary_attention,
        _rotated_like,
    ),
    "delta_rule(Tensor(a!) channel, Tensor qkv, Tensor log_decay, Tensor beta, Tensor conv, "
    "int v_dim) -> Tensor": (
        _delta_rule,
        lambda channel, qkv, log_decay, beta, conv, v_dim: qkv.new_empty(*beta.shape, v_dim),
    ),
    "exchange_experts(Tensor(a!) channel, Tensor(b!) y, Tensor ids) -> ()": (
        _exchange_experts,
        lambda *_: None,
    ),
    "sum_over_ranks(Tensor(a!) channel, Tensor(b!) y) -> ()": (_sum_over_ranks, lambda *_: None),
    "gather_logits(Tensor(a!) channel, Tensor logits, int vocab_size) -> Tensor": (
        _gather_logits,
        lambda channel, logits, vocab_size: logits.new_empty(logits.shape[0], vocab_size),
    ),
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor": (
        _linear,
        lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    ),
    "expert_linear(Tensor x, Tensor weight, Tensor? bias, Tensor ids, Tensor? order=None) -> Tensor": (
        _expert_linear,
        lambda x, weight, bias, ids, order=None: x.new_empty(ids.numel(), weight.shape[1]),
    ),
    "choose_experts(Tensor(a!) channel, Tensor logits, Tensor live, Tensor? correction, float[] choice, "
    "int first_expert, int num_held, int site) -> (Tensor, Tensor, Tensor)": (
        _choose_experts,
        lambda channel, logits, live, correction, choice, first_expert, num_held, site: (
            logits.new_empty(logits.shape[0], int(choice[0]), dtype=torch.float32),
            logits.new_empty(logits.shape[0], int(choice[0]), dtype=torch.int32),
            logits.new_empty(num_held + 2 + logits.shape[0] * int(choice[0]), dtype=torch.int32),
        ),
    ),
    "gated_expert_linear(Tensor(a!) channel, Tensor x, Tensor weight, Tensor? bias, Tensor ids, "
    "Tensor order, bool clamped, float limit, int site, int first_expert) -> Tensor": (
        _gated_expert_linear,
        lambda channel, x, weight, bias, ids, *_: x.new_empty(ids.numel(), weight.shape[1] // 2),
    ),
    "sum_experts(Tensor y, Tensor weights) -> Tensor": (
        _sum_experts,
        lambda y, weights: y.new_empty(weights.shape[0], y.shape[1]),
    ),
    "norm(Tensor x, Tensor weight, float eps, bool centred, Tensor? bias) -> Tensor": (
        _norm,
        lambda x, *_: torch.empty_like(x),
    ),
    "quantised_linear(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, Tensor? ids, "
    "str form, int num_out) -> Tensor": (
        _quantised_linear,
        lambda x, data, scale, zero, bias, ids, form, num_out: x.new_empty(
            x.shape[0] if ids is None else ids.numel(), num_out
        ),
    ),
}
for _schema, (_does, _fake) in _OPS.items():
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _does, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_lora::{_name}", _fake, lib=_library)

lora_begin = torch.ops.moe_lora.lora_begin
lora_add_to = torch.ops.moe_lora.lora_add_to
lora_linear = torch.ops.moe_lora.lora_linear
paged_attention = torch.ops.moe_lora.paged_attention
delta_rule = torch.ops.moe_lora.delta_rule
exchange_experts = torch.ops.moe_lora.exchange_experts
sum_over_ranks = torch.ops.moe_lora.sum_over_ranks
gather_logits = torch.ops.moe_lora.gather_logits
expert_linear = torch.ops.moe_lora.expert_linear
choose_experts = torch.ops.moe_lora.choose_experts
gated_expert_linear = torch.ops.moe_lora.gated_expert_linear
quantised_linear = torch.ops.moe_lora.quantised_linear
