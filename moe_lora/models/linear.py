# SPDX-License-Identifier: Apache-2.0
"""Linear layers with LoRA deltas: one dense site, or all experts' site."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.core.shape import ModelShape
from moe_lora.kernels import ops

from .quantised_weight import QuantisedWeight


def site_index(shape: ModelShape, name: str) -> int:
    """Number of the site in operations."""
    return next(i for i, site in enumerate(shape.sites) if site.name == name)


def parameter(*size: int) -> nn.Parameter:
    """An uninitialised weight for the loader."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


def linear(
    x: torch.Tensor, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight.T + bias, for a plain or quantised weight."""
    return weight.multiply(x, bias) if isinstance(weight, QuantisedWeight) else ops.linear(x, weight, bias)


def site_linear(
    channel: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    bias: torch.Tensor | None,
    ids_TK: torch.Tensor | None,
    site: int,
    first_expert: int,
) -> torch.Tensor:
    """Base layer and deltas in one operation."""
    rest = (bias, ids_TK, site, first_expert)
    if isinstance(weight, QuantisedWeight):
        held = (weight.data, weight.scale, weight.zero)
        return ops.lora_linear(channel, x, *held, *rest, weight.form_text, weight.num_out)
    return ops.lora_linear(channel, x, weight, None, None, *rest, "", weight.shape[-2])


class LoraLinear(nn.Module):
    """y = x @ weight.T + bias + deltas, for all modules of one dense site."""

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


class Fp32Linear(LoraLinear):
    """`LoraLinear` without bias, with weight and output in fp32."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp32Linear:
        return super()._apply(lambda held: fn(held).float(), recurse)

    def forward(self, x: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return super().forward(x, channel)
        ops.lora_begin(channel, x, None, self.site)
        deltas = x.new_zeros(len(x), self.weight.shape[0])
        ops.lora_add_to(channel, deltas, x, self.site)
        return linear(x.float(), self.weight, None) + deltas


class Fp32Vector(nn.Module):
    """A vector in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = parameter(size)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp32Vector:
        return super()._apply(lambda held: fn(held).float(), recurse)


class ExpertLinear(nn.Module):
    """As `LoraLinear`, once per expert: expert ids[t, k] computes row t*K + k of y.

    experts: local, in the order of the weight's first dim.
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
        """ids: local experts, or -1 for rows with output 0."""
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
        """`glu` of `forward`; a single operation with an order."""
        if order is None or isinstance(self.weight, QuantisedWeight):
            return glu(self(x, ids_TK, channel, order), activation, limit)
        ops.lora_begin(channel, x, ids_TK, self.site)
        weights = (self.weight, self.bias, numbered_from(self.experts.start, ids_TK), order)
        how = (activation != "silu", limit, self.site, self.experts.start)
        return ops.gated_expert_linear(channel, x, *weights, *how)


def numbered_from(first: int, ids_TK: torch.Tensor) -> torch.Tensor:
    """The ids with `first` as number 0; -1 stays."""
    return torch.where(ids_TK < 0, ids_TK, ids_TK - first) if first else ids_TK


def glu(y: torch.Tensor, activation: str, limit: float) -> torch.Tensor:
    """Gated activation of the fused [rows, 2F] output of gate and up -> [rows, F]."""
    gate, up = y.float().chunk(2, dim=-1)
    if activation == "silu":
        return (F.silu(gate) * up).to(y.dtype)
    if activation == "gelu_tanh":
        return (F.gelu(gate, approximate="tanh") * up).to(y.dtype)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(y.dtype)
