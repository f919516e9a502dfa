"""Messages for operands that the CPU kernels refuse; built only once something is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .step import KvLayout, SlotTable

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

# The Refusal codes of csrc/kernels.h.
_BAD_EXPERT, _BAD_SLOT, _WORKSPACE_TOO_SMALL, _BAD_PAGE = -2, -3, -4, -5


def weight_error(x: torch.Tensor, weight: torch.Tensor) -> str:
    """What is wrong with the operands of a linear layer."""
    return (
        f"weight must be contiguous {x.dtype} with rows of {x.shape[-1]}, not {weight.dtype} of shape "
        f"{tuple(weight.shape)} and strides {weight.stride()}"
    )


def lora_error(refusal: int, site: Site, slots: SlotTable, workspace: torch.Tensor) -> str:
    """What the library refused in shrink or expand."""
    if refusal == _BAD_EXPERT:
        return f"ids hold an expert outside -1 .. {max(1, site.num_experts) - 1}"
    if refusal == _BAD_SLOT:
        return f"row_slot holds a slot outside -1 .. {slots.num_slots - 1}"
    assert refusal == _WORKSPACE_TOO_SMALL, refusal
    return f"a workspace of {workspace.numel()} floats is too small; see lora_workspace_floats"


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
