"""Messages for operands that the CPU kernels refuse; built only once something is wrong."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from moe_lora.config import LORA_KERNELS

from moe_lora.kernels.operands import KvLayout, LoraOperands

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

# The Refusal codes of csrc/kernels.h.
_BAD_EXPERT, _BAD_SLOT, _BAD_OFFSET, _BAD_PAGE = -2, -3, -4, -5


def weight_error(x: torch.Tensor, weight: torch.Tensor) -> str:
    """What is wrong with the operands of a linear layer."""
    return (
        f"weight must be contiguous {x.dtype} with rows of {x.shape[-1]}, not {weight.dtype} of shape "
        f"{tuple(weight.shape)} and strides {weight.stride()}"
    )


def shrink_error(operands: LoraOperands, kernel: str) -> str:
    """What is wrong with the operands of shrink."""
    x, ids, site, layer, _, slots, _ = operands
    _, num_layers, num_entries = slots.lora_rank.shape
    if x.dim() != 2 or x.shape[1] != site.in_features:
        return f"x must be [rows, {site.in_features}] at site {site.name!r}, not of shape {tuple(x.shape)}"
    if (ids is None) != (site.num_experts == 0):
        given = "no ids" if ids is None else "ids"
        return f"{given} given, but site {site.name!r} has {site.num_experts} experts"
    if not 0 <= layer < num_layers:
        return f"layer={layer} is outside 0 .. {num_layers - 1} of the slot table"
    if kernel not in LORA_KERNELS:
        return f"kernel={kernel!r} is unknown; choose one of {', '.join(LORA_KERNELS)}"
    return f"site {site.name!r} needs more entries than the {num_entries} of the slot table"


def lora_error(refusal: int, operands: LoraOperands) -> str:
    """What the library refused in shrink."""
    if refusal == _BAD_EXPERT:
        return f"ids hold an expert outside -1 .. {max(1, operands.site.num_experts) - 1}"
    if refusal == _BAD_SLOT:
        return f"token_slots holds a slot outside -1 .. {operands.slots.num_slots - 1}"
    assert refusal == _BAD_OFFSET, refusal
    return _offset_error(operands)


def _offset_error(operands: LoraOperands) -> str:
    """Names the first matrix of the batch that does not lie in the arena."""
    x, ids, site, layer, token_slots, slots, arena = operands
    arena_bytes, itemsize = arena.numel(), x.element_size()
    experts = [0] if ids is None else ids[ids >= 0].unique().tolist()
    for slot, expert in itertools.product(token_slots[token_slots >= 0].unique().tolist(), experts):
        for module, width in enumerate(site.out_features):
            index = (slot, layer, site.entry(module, expert))
            for name, row_features in (("a_offset", site.in_features), ("b_offset", width)):
                offset = int(getattr(slots, name)[index])
                num_bytes = int(slots.lora_rank[index]) * row_features * itemsize
                if num_bytes > 0 and (not 0 <= offset <= arena_bytes - num_bytes or offset % itemsize):
                    return (
                        f"{name}[{slot}, {layer}, {index[2]}]={offset}: {num_bytes} bytes from there must "
                        f"lie in the arena of {arena_bytes} bytes and start at a multiple of {itemsize}"
                    )
    raise AssertionError("the library refused an offset that fits")


def target_error(y: torch.Tensor, name: str, site: Site, num_rows: int, dtype: torch.dtype) -> str:
    """What is wrong with the tensor that deltas are added to."""
    width = site.columns[-1] + site.out_features[-1]
    return (
        f"{name} must be {dtype} on the CPU with {num_rows} rows of at least {width} columns at site "
        f"{site.name!r}, not {y.dtype} on {y.device} of shape {tuple(y.shape)}"
    )


def attention_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, layout: KvLayout) -> str:
    """What is wrong with the operands of attention."""
    return (
        f"q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}, v {v.dtype} {tuple(v.shape)} and "
        f"scale={scale} do not fit {layout}; need its dtype and head_dim, k and v with its "
        "num_kv_heads, heads a multiple of these, and a positive scale"
    )


def step_error(refusal: int) -> str:
    """What the library refused in the step tables."""
    if refusal == _BAD_PAGE:
        return "block_tables hold a page outside the arena"
    return "query_start must ascend within the rows, and seq_lens cover the rows and fit the block table"
