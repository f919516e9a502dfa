# SPDX-License-Identifier: Apache-2.0
"""Linear layers over quantised weights on a GPU.

Legend: see `experts`; R rows: T, or T*K.  A tile becomes round(scale * q) in x's dtype, with the bits of
`quantised.dequantise`.  H, format and dtype fix the order of fp32 sums.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from moe_lora.kernels.quantised import Format, QuantisedOperand
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.lora.segments import Tiles, build_segments

_SPLIT_K = 4
_FEW_ROWS, _MANY_ROWS = 16, 64
_BLOCK_N, _BLOCK_JOINED = 64, 512
_PROGRAMS_PER_SM = 4


class Weight(NamedTuple):
    """A `QuantisedOperand`'s tensors; without zero points `zero` is data."""

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


def quantised_linear(
    x: torch.Tensor,
    weight: QuantisedOperand,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    num_out: int,
) -> torch.Tensor:
    """x @ dequantised weight.T + bias, of one matrix or (with ids) of the rows' experts.

    x: [T, H] or [T*K, H], bf16, fp16 or fp32, rows contiguous.  bias: [N] or [E, N].  ids: [T, K] int32,
    outside 0..E-1 gives a zero row.  Returns [R, N].  Raises ValueError for bad operands, and for a dynamic
    format.
    """
    _check(x, weight, bias, ids, num_out)
    return launch(x, weight, bias, ids, num_out)


def launch(
    x: torch.Tensor,
    weight: QuantisedOperand,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    num_out: int,
) -> torch.Tensor:
    """`quantised_linear` of checked operands."""
    num_rows = x.shape[0] if ids is None else ids.numel()
    if num_rows == 0:
        return x.new_empty(0, num_out)
    num_experts = 1 if ids is None else weight.data.shape[0]
    many = num_rows > _FEW_ROWS * num_experts
    block_t = _MANY_ROWS if many else _FEW_ROWS
    most_tiles = min(num_rows, num_experts - 1 + -(-num_rows // block_t))
    num_items = most_tiles * -(-num_out // _BLOCK_N)
    at_once = {"programs_per_sm": _PROGRAMS_PER_SM}
    apart = num_items < configs.num_programs(x.device, at_once, _SPLIT_K * num_items)
    if apart:
        out = x.new_empty(_SPLIT_K, num_rows, num_out, dtype=torch.float32)
    else:
        out = x.new_empty(num_rows, num_out) if ids is None else x.new_zeros(num_rows, num_out)
    rows, tiles = x, Tiles(x, x)
    if ids is not None:
        segments = build_segments(ids.new_zeros(ids.shape[0]), ids, 1, num_experts)
        rows, tiles = segments.rows, segments.tiles(block_t)
    kernels = configs.kernels("linear.quantised_kernels")
    form, data, scale, zero = weight
    data = data.view(torch.uint8) if form.name == "fp8" else data
    given: dict[str, Any] = {
        "HAS_IDS": ids is not None,
        "HAS_BIAS": bias is not None,
        "SPLIT_K": _SPLIT_K,
        "BLOCK_N": _BLOCK_N,
        "INTERPRETED": configs.interpreted(),
    }
    configs.start(
        kernels.quantised_tiles,
        configs.num_programs(x.device, at_once, num_items * (_SPLIT_K if apart else 1)),
        *(x, Weight(data, scale, data if zero is None else zero), x if bias is None else bias),
        *(rows, tiles, out, num_rows, num_out, x.shape[1], x.stride(0)),
        X_DIVISOR=num_rows // x.shape[0],
        NAME=form.name,
        GROUP=form.group_size,
        ROW_GROUP=form.row_group,
        HAS_ZERO=zero is not None,
        APART=apart,
        BLOCK_T=block_t,
        **_steps(form, x.dtype),
        **given,
    )
    if not apart:
        return out
    joined = x.new_empty(num_rows, num_out)
    configs.start(
        kernels.join_parts,
        num_rows * -(-num_out // _BLOCK_JOINED),
        *(out, x if bias is None else bias, x if ids is None else ids, joined),
        *(num_rows, num_out, num_experts),
        **{**given, "BLOCK_N": _BLOCK_JOINED},
    )
    return joined


def _steps(form: Format, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes of a row per step, and stages."""
    packed, group, exact = form.bits == 4, form.group_size, dtype == torch.float32
    one_group = group % (32 if packed else 16) == 0
    if packed:
        num_bytes = 32 if exact or group % 128 else 64
    else:
        num_bytes = 16 if exact else math.gcd(64, group) if one_group else 64
    stages = 2 if exact else 4
    return {
        "PACKED": packed,
        "ONE_GROUP": one_group,
        "BLOCK_B": num_bytes,
        "STAGES": stages,
        "num_stages": stages,
        "num_warps": 4,
    }


def _check(
    x: torch.Tensor,
    weight: QuantisedOperand,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    num_out: int,
) -> None:
    form, data, scale, zero = weight
    if x.device.type != "cuda" and not configs.interpreted():
        raise ValueError(f"x lies on {x.device}; this kernel takes CUDA tensors")
    if x.dtype not in configs.DTYPE_NAMES or x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; it must be rows of contiguous "
            "bfloat16, float16 or float32"
        )
    if form.dynamic:
        raise ValueError(f"{form.name} quantises inputs, which runs on CPU only; use {form.name[:4]}")
    experts = () if ids is None else (data.shape[0],)
    sizes = [(*experts, *size) for size in form.sizes(num_out, x.shape[1])]
    zeros = (*experts, num_out, form.num_groups(x.shape[1]))
    given = [("data", data, sizes[0]), ("scale", scale, sizes[1])]
    given += [] if zero is None else [("zero", zero, zeros)]
    given += [] if bias is None else [("bias", bias, (*experts, num_out))]
    for name, tensor, size in given:
        if tuple(tensor.shape) != size or not tensor.is_contiguous() or tensor.device != x.device:
            raise ValueError(
                f"{name} of {form.name} weights with {num_out} outputs and {x.shape[1]} inputs is "
                f"{tuple(tensor.shape)} on {tensor.device}; it must be contiguous {size} on {x.device}"
            )
    if ids is not None and x.shape[0] not in (ids.shape[0], ids.numel()):
        raise ValueError(
            f"x has {x.shape[0]} rows; ids {tuple(ids.shape)} need {ids.shape[0]} or {ids.numel()}"
        )
