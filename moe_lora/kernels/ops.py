"""The operations a compiled step is made of, registered with torch.library.

Operations that touch the arena or the LoRA tables take a channel: a small int64 tensor [handle, layer].
It is declared mutated, which keeps their executed order (begin < base GEMM < add_to, KV writes in place)
under torch.compile, and the arena itself never enters a graph.  `begin` also declares x mutated, so that
the base GEMM, which reads x, can't be moved before it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import reference
from .cpu import cpu
from .quantised import QuantisedOperand, format_of

_handlers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


def open_channels(handler: Any, num_layers: int) -> list[torch.Tensor]:
    """One channel per layer for this handler; they stay valid as long as the handler lives.

    handler: answers the operations of one engine that take a channel (see `engine.runner.ExecutionContext`).
    """
    handle = next(_next_handle)
    _handlers[handle] = handler
    return [torch.tensor([handle, layer], dtype=torch.int64) for layer in range(num_layers)]


def _lora_begin(channel: torch.Tensor, x: torch.Tensor, ids: torch.Tensor | None, site: int) -> torch.Tensor:
    handle, layer = channel.tolist()
    return _handlers[handle].lora_begin(layer, site, x, ids)


def _lora_add_to(channel: torch.Tensor, ticket: torch.Tensor, y: torch.Tensor) -> None:
    _handlers[channel.tolist()[0]].lora_add_to(ticket, y)


def _paged_attention(channel: torch.Tensor, *operands: Any) -> torch.Tensor:
    handle, layer = channel.tolist()
    return _handlers[handle].paged_attention(layer, *operands)


def _exchange_experts(channel: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
    _handlers[channel.tolist()[0]].exchange_experts(y, ids)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.is_cpu and x.shape[0] <= cpu.LINEAR_MAX_ROWS[x.dtype]:
        return cpu.linear(x, weight, bias)
    return reference.linear(x, weight, bias)


def _expert_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    if x.is_cpu:
        return cpu.expert_linear(x, weight, bias, ids)
    return reference.expert_linear(x, weight, bias, ids)


def _quantised_linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    form: str,
    group_size: int,
    num_out: int,
) -> torch.Tensor:
    weight = QuantisedOperand(format_of(form, group_size), data, scale)
    if ids is None and not weight.form.dynamic and x.shape[0] > cpu.LINEAR_MAX_ROWS[x.dtype]:
        return reference.quantised_linear(x, weight, bias, ids, num_out)
    return cpu.quantised_linear(x, weight, bias, ids, num_out)


_library = torch.library.Library("moe_lora", "FRAGMENT")
_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lora_begin(Tensor(a!) channel, Tensor(b!) x, Tensor? ids, int site) -> Tensor": (
        _lora_begin,
        lambda channel, x, ids, site: torch.empty(1, dtype=torch.int64),
    ),
    "lora_add_to(Tensor(a!) channel, Tensor ticket, Tensor(b!) y) -> ()": (_lora_add_to, lambda *_: None),
    "paged_attention(Tensor(a!) channel, Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, "
    "int window) -> Tensor": (
        _paged_attention,
        lambda channel, q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    ),
    "exchange_experts(Tensor(a!) channel, Tensor(b!) y, Tensor ids) -> ()": (
        _exchange_experts,
        lambda *_: None,
    ),
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor": (
        _linear,
        lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    ),
    "expert_linear(Tensor x, Tensor weight, Tensor? bias, Tensor ids) -> Tensor": (
        _expert_linear,
        lambda x, weight, bias, ids: x.new_empty(ids.numel(), weight.shape[1]),
    ),
    "quantised_linear(Tensor x, Tensor data, Tensor scale, Tensor? bias, Tensor? ids, str form, "
    "int group_size, int num_out) -> Tensor": (
        _quantised_linear,
        lambda x, data, scale, bias, ids, form, group_size, num_out: x.new_empty(
            x.shape[0] if ids is None else ids.numel(), num_out
        ),
    ),
}
"""By schema: what the operation does, and its result's shape and dtype alone, for the compiler."""
for _schema, (_does, _fake) in _OPS.items():
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _does, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_lora::{_name}", _fake, lib=_library)

lora_begin = torch.ops.moe_lora.lora_begin
lora_add_to = torch.ops.moe_lora.lora_add_to
paged_attention = torch.ops.moe_lora.paged_attention
exchange_experts = torch.ops.moe_lora.exchange_experts
linear = torch.ops.moe_lora.linear
expert_linear = torch.ops.moe_lora.expert_linear
quantised_linear = torch.ops.moe_lora.quantised_linear
