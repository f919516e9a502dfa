"""The operations on CPU: a binding of the C++ kernels in csrc/, same meaning as in `reference`.

Legend: T token rows, H input width, N output width, E experts, K experts per token, S sequences.

Every call releases the GIL and uses up to `torch.get_num_threads()` threads. Results are bit-stable: a row's
result does not depend on the other rows of the call, nor on the number of threads.
"""

from __future__ import annotations

import torch

from . import cpu_errors
from . import library as cpu_library
from .library import check_rows, checked, dtype_code, kv_pages, lib, row_stride
from .cpu_lora import Shrunk, lora_delta, lora_expand, lora_shrink
from moe_lora.kernels.operands import KvLayout, StepTables

__all__ = [
    "LINEAR_MAX_ROWS",
    "Shrunk",
    "expert_linear",
    "isa",
    "linear",
    "lora_delta",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
]

_threads = torch.get_num_threads
isa = cpu_library.isa

_MAX_ROWS = {"avx512_bf16": (128, 4096), "avx512": (32, 4096), "amx_bf16": (16, 4096), "avx2": (16, 16)}
LINEAR_MAX_ROWS = dict(zip((torch.bfloat16, torch.float32), _MAX_ROWS.get(isa(), (4, 4)), strict=True))
"""Up to this many rows `linear` beats torch's, by dtype (measured with AVX-512, cautious elsewhere)."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias.  x: [T, H], rows may be strided.  weight: [N, H].  bias: [N].  Returns [T, N].

    All of one dtype, fp32 or bf16; sums in fp32. Raises ValueError for other dtypes, shapes or strides.
    """
    code = dtype_code(x)
    rows, width = x.shape
    num_out = weight.shape[0]
    if weight.shape[1] != width or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(cpu_errors.weight_error(x, weight))
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
        raise ValueError(cpu_errors.weight_error(x, weight))
    check_rows(x, tokens, top_k)
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

    q: [T, heads, head_dim], k and v: [T, kv heads, head_dim] in the layout's dtype; rows may be strided
    (parts of one fused qkv buffer).  Returns [T, heads, head_dim]. Raises ValueError for what doesn't fit.
    """
    code = dtype_code(q)
    rows, heads, dim = q.shape
    if not (q.dtype == k.dtype == v.dtype == layout.dtype and dim == layout.head_dim and scale > 0):
        raise ValueError(cpu_errors.attention_error(q, k, v, scale, layout))
    kv_shape = (rows, layout.num_kv_heads, dim)
    if k.shape != kv_shape or v.shape != kv_shape or heads % layout.num_kv_heads:
        raise ValueError(cpu_errors.attention_error(q, k, v, scale, layout))
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
        raise ValueError(cpu_errors.step_error(refusal))
    return out
