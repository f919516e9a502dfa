"""The linear layers that LoRA sites are made of.

Legend: T token rows, H hidden size, E experts, K experts per token.

A LoRA site is always the same three lines: begin, base GEMM, add_to.  Site numbers index
`ModelShape.sites`.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_lora.core.shape import ModelShape
from moe_lora.kernels import ops


def site_index(shape: ModelShape, name: str) -> int:
    """Number by which operations know the site."""
    return next(i for i, site in enumerate(shape.sites) if site.name == name)


def parameter(*size: int) -> nn.Parameter:
    """An uninitialised weight that the loader fills."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


class LoraLinear(nn.Module):
    """y = x @ weight.T + bias + deltas, for all modules of one dense site at once."""

    def __init__(self, shape: ModelShape, site_name: str, *, bias: bool) -> None:
        super().__init__()
        self.site = site_index(shape, site_name)
        site = shape.sites[self.site]
        self.weight = parameter(site.total_out_features, site.in_features)
        self.bias = parameter(site.total_out_features) if bias else None

    def forward(self, x: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
        ticket = ops.lora_begin(channel, x, None, self.site)
        y = ops.linear(x, self.weight, self.bias)
        ops.lora_add_to(channel, ticket, y)
        return y


class ExpertLinear(nn.Module):
    """As `LoraLinear`, once per expert: row t*K + k of y is computed by expert ids[t, k].

    experts: those whose weights are held here, in the order of the weight's first dim.
    """

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
        y = ops.expert_linear(x, self.weight, self.bias, rows_TK)
        ops.lora_add_to(channel, ticket, y)
        return y
