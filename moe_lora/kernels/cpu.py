"""The operations on CPU: a binding of the C++ kernels in csrc/, same meaning as in `reference`.

Legend: T token rows, H input width, N output width, E experts, K experts per token, S sequences.

Every call releases the GIL and uses up to `torch.get_num_threads()` threads. Results are bit-stable: a row's
result does not depend on the other rows of the call, nor on the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import cpu_library
from .cpu_library import checked, dtype_code, kv_pages, lib, lora_site, lora_slots, row_stride
from .step import KvLayout, SlotTable, StepTables

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

LINEAR_MAX_ROWS = {torch.bfloat16: 128, torch.float32: 128}
"""Up to this many rows `linear` is faster than torch's."""

_threads = torch.get_num_threads
isa = cpu_library.isa


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias.  x: [T, H], rows may be strided.  weight: [N, H].  bias: [N].  Returns [T, N].

    All of one dtype, fp32 or bf16; sums in fp32. Raises ValueError for other dtypes, shapes or strides.
    """
    code = dtype_code(x)
    rows, width = x.shape
    num_out = weight.shape[0]
    if weight.shape[1] != width or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(cpu_library.weight_error(x, weight))
    out = torch.empty((rows, num_out), dtype=x.dtype)
    bias_ptr = None if bias is None else checked(bias, "bias", x.dtype, num_out)
    lib.moe_lora_linear(
        code,
        _threads(),
        x.data_ptr(),
        row_stride(x),
        weight.data_ptr(),
        bias_ptr,
        out.data_ptr(),
        rows,
        num_out,
        width,
    )
    return out


def expert_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """out[t*K + k] = x_row @ weight[ids[t, k]].T + bias[ids[t, k]]; id -1 gives a zero row.

    x: [T, H] or [T*K, H], rows may be strided.  weight: [E, N, H].  bias: [E, N].  ids: [T, K] int32.
    Returns [T*K, N] in x's dtype. Raises ValueError for an id outside -1 .. E-1, or operands that don't fit.
    """
    code = dtype_code(x)
    tokens, top_k = ids.shape
    experts, num_out, width = weight.shape
    if x.shape[1] != width or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(cpu_library.weight_error(x, weight))
    _check_rows(x, tokens, top_k)
    out = torch.empty((tokens * top_k, num_out), dtype=x.dtype)
    refusal = lib.moe_lora_expert_linear(
        *(code, _threads(), x.data_ptr(), row_stride(x), x.shape[0], weight.data_ptr()),
        None if bias is None else checked(bias, "bias", x.dtype, experts * num_out),
        *(checked(ids, "ids", torch.int32, tokens * top_k), tokens, top_k, experts),
        *(out.data_ptr(), num_out, width),
    )
    if refusal:
        raise ValueError(f"ids hold an expert outside -1 .. {experts - 1}")
    return out


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
    _check_rows(x, tokens, top_k)
    refusal = lib.moe_lora_shrink(
        *(code, _threads(), x.data_ptr(), row_stride(x), x.shape[0], ids_ptr, tokens, top_k),
        *(lora_site(site), layer, checked(row_slot, "row_slot", torch.int32, tokens), lora_slots(slots)),
        *(arena.data_ptr(), checked(workspace, "workspace", torch.float32, None), workspace.numel()),
    )
    if refusal:
        raise ValueError(cpu_library.lora_error(refusal, site, slots, workspace))


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
        raise ValueError(cpu_library.lora_error(refusal, site, slots, workspace))


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    layer: int,
    step: StepTables,
    layout: KvLayout,
    arena: torch.Tensor,
) -> torch.Tensor:
    """Write this step's K and V to their pages, then causal attention; see `reference.paged_attention`.

    q: [T, heads, head_dim], k and v: [T, kv heads, head_dim] in the layout's dtype; their rows may be strided
    (parts of one fused qkv buffer).  Returns [T, heads, head_dim]. Raises ValueError for operands that don't fit.
    """
    code = dtype_code(q)
    rows, heads, dim = q.shape
    if not (q.dtype == k.dtype == v.dtype == layout.dtype and dim == layout.head_dim and scale > 0):
        raise ValueError(cpu_library.attention_error(q, k, v, scale, layout))
    kv_shape = (rows, layout.num_kv_heads, dim)
    if k.shape != kv_shape or v.shape != kv_shape or heads % layout.num_kv_heads:
        raise ValueError(cpu_library.attention_error(q, k, v, scale, layout))
    num_seqs, table_stride = step.block_tables.shape
    if sinks is not None and sinks.dtype != torch.float32:
        sinks = sinks.float()
    out = torch.empty((rows, heads, dim), dtype=q.dtype)
    refusal = lib.moe_lora_paged_attention(
        *(
            code,
            _threads(),
            q.data_ptr(),
            row_stride(q),
            k.data_ptr(),
            row_stride(k),
            v.data_ptr(),
            row_stride(v),
        ),
        *(None if sinks is None else checked(sinks, "sinks", torch.float32, heads), scale, window, layer),
        checked(step.query_start, "query_start", torch.int32, num_seqs + 1),
        checked(step.seq_lens, "seq_lens", torch.int32, num_seqs),
        checked(step.block_tables, "block_tables", torch.int32, num_seqs * table_stride),
        *(
            num_seqs,
            table_stride,
            kv_pages(layout),
            arena.data_ptr(),
            arena.numel(),
            rows,
            heads,
            out.data_ptr(),
        ),
    )
    if refusal:
        raise ValueError(cpu_library.step_error(refusal))
    return out


def _ids(ids: torch.Tensor | None, row_slot: torch.Tensor) -> tuple[int, int, int | None]:
    """Tokens, experts per token (1 at a dense site), and the address of the ids."""
    if ids is None:
        return row_slot.shape[0], 1, None
    tokens, top_k = ids.shape
    return tokens, top_k, checked(ids, "ids", torch.int32, tokens * top_k)


def _check_rows(x: torch.Tensor, tokens: int, top_k: int) -> None:
    if x.shape[0] != tokens and x.shape[0] != tokens * top_k:
        raise ValueError(
            f"x has {x.shape[0]} rows; {tokens} tokens x {top_k} experts need {tokens} or {tokens * top_k}"
        )
