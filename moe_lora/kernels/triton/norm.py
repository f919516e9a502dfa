# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of row norms outside compiled graphs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import configs
from .entries import rounded


@triton.jit
def norm_rows(
    x,
    weight,
    bias,
    y,
    eps,
    x_row,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[row] = `reference.norm` of x[row].  x, y: [R, WIDTH], x's rows x_row apart."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < WIDTH
    value = tl.load(x + row * x_row + n, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, axis=0) / WIDTH, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value = value * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + n, rounded(value, y.dtype.element_ty, INTERPRETED), mask=inside)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.norm`.  x: [R, H], bf16, fp16 or fp32.  weight, bias: [H].

    A row's bits don't depend on further rows.  Raises ValueError for bad operands.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.dtype not in configs.DTYPE_NAMES:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)}; rows of bfloat16, float16 or "
            "float32 and a weight for each column are needed"
        )
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(f"bias is {tuple(bias.shape)}, weight {tuple(weight.shape)}; equal shapes fit")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        width = x.shape[1]
        x = x if x.stride(1) == 1 else x.contiguous()
        configs.start(
            norm_rows,
            len(x),
            *(x, weight.contiguous(), (weight if bias is None else bias).contiguous()),
            *(y, float(eps), x.stride(0)),
            WIDTH=width,
            CENTRED=centred,
            BIASED=bias is not None,
            INTERPRETED=configs.interpreted(),
            BLOCK=1 << (width - 1).bit_length(),
            num_warps=4 if width <= 4096 else 8,
        )
    return y
