"""LoRA shrink and expand on CPU; part of `cpu`.

Legend: T token rows, H input width, N output width, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import cpu_errors
from .cpu_library import check_rows, checked, dtype_code, lib, lora_site, lora_slots, row_stride
from .step import SlotTable

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

_threads = torch.get_num_threads


def lora_workspace_floats(num_rows: int, site: Site, max_lora_rank: int) -> int:
    """fp32 elements that `lora_shrink` needs at most for `num_rows` rows (T, or T*K at an expert site)."""
    return num_rows * len(site.modules) * max_lora_rank


def lora_shrink(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    site: Site,
    layer: int,
    row_slot: torch.Tensor,
    slots: SlotTable,
    arena: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """workspace = x_row @ A.T in fp32, for each row that has an adapter and each module of the site.

    x: [T, H] or [T*K, H], fp32 or bf16, rows may be strided; the adapters are of the same dtype.  ids: [T, K]
    int32 at an expert site, else None.  row_slot: [T] int32, -1 = no adapter.  arena: uint8.
    workspace: fp32, flat, see `lora_workspace_floats`; its layout is private to shrink and expand.
    Modules that share A (same a_offset) are computed once. Raises ValueError for operands that don't fit.
    Source: Punica (arXiv 2310.18547), SGMV shrink.
    """
    code = dtype_code(x)
    tokens, top_k, ids_ptr = _ids(ids, row_slot)
    if x.shape[1] != site.in_features:
        raise ValueError(f"x is {x.shape[1]} wide, site {site.name!r} takes {site.in_features}")
    check_rows(x, tokens, top_k)
    refusal = lib.moe_lora_shrink(
        *(code, _threads(), x.data_ptr(), row_stride(x), x.shape[0], ids_ptr, tokens, top_k),
        *(lora_site(site), layer, checked(row_slot, "row_slot", torch.int32, tokens), lora_slots(slots)),
        *(arena.data_ptr(), checked(workspace, "workspace", torch.float32, None), workspace.numel()),
    )
    if refusal:
        raise ValueError(cpu_errors.lora_error(refusal, site, slots, workspace))


def lora_expand(
    workspace: torch.Tensor,
    ids: torch.Tensor | None,
    site: Site,
    layer: int,
    row_slot: torch.Tensor,
    slots: SlotTable,
    arena: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """y[row, columns of module] += scale * h @ B, h being what `lora_shrink` left in the workspace.

    The other arguments must be those of the `lora_shrink` call. y: [T, N] or [T*K, N] in the model's dtype,
    rows may be strided; one rounding at the end. Raises ValueError for operands that don't fit.
    """
    code = dtype_code(y)
    tokens, top_k, ids_ptr = _ids(ids, row_slot)
    if y.shape[0] != tokens * top_k or y.shape[1] < site.columns[-1] + site.out_features[-1]:
        raise ValueError(
            f"y of shape {tuple(y.shape)} does not fit {tokens * top_k} rows of site {site.name!r}, "
            f"{site.columns[-1] + site.out_features[-1]} wide"
        )
    refusal = lib.moe_lora_expand(
        *(code, _threads(), checked(workspace, "workspace", torch.float32, None), workspace.numel()),
        *(ids_ptr, tokens, top_k, lora_site(site), layer),
        *(checked(row_slot, "row_slot", torch.int32, tokens), lora_slots(slots), arena.data_ptr()),
        *(y.data_ptr(), row_stride(y)),
    )
    if refusal:
        raise ValueError(cpu_errors.lora_error(refusal, site, slots, workspace))


def _ids(ids: torch.Tensor | None, row_slot: torch.Tensor) -> tuple[int, int, int | None]:
    """Tokens, experts per token (1 at a dense site), and the address of the ids."""
    if ids is None:
        return row_slot.shape[0], 1, None
    tokens, top_k = ids.shape
    return tokens, top_k, checked(ids, "ids", torch.int32, tokens * top_k)
