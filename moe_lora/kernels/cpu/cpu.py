# SPDX-License-Identifier: Apache-2.0
"""The operations on CPU: the C++ kernels in csrc/, equal in meaning to `reference`.

Legend: T token rows, H input width, N output width, E experts, K experts per token, S sequences, R LoRA rank.
Of the gated delta rule: P pages of a state, C channels of the convolution, W its width, N value heads, K
size of a key head, V of a value head.

Calls release the GIL.  A row's bits depend neither on further rows nor on threads.  LoRA kernels, equal in
bits:

- "sgmv" (ours): rows of one (adapter, expert) form a segment, at true rank.
- "bgmv" (Punica, arXiv 2310.18547): row by row, padded to the batch's largest rank (Toppings, equation 2).
- "mbgmv" (S-LoRA, arXiv 2311.03285): row by row at true rank.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.kernels.operands import AttentionOperands, KvLayout, LoraOperands, StepTables
from moe_lora.kernels.quantised import Format, QuantisedOperand

from . import library
from .library import check_rows, checked, dtype_code, kv_pages, lib, lora_site, lora_slots, row_stride

if TYPE_CHECKING:
    from moe_lora.core.attention_shapes import DeltaShape
    from moe_lora.core.shape import Site


KERNELS = {"sgmv": 0, "bgmv": 1, "mbgmv": 2}

_threads = torch.get_num_threads
_shrink, _expand, _release = lib.moe_lora_shrink, lib.moe_lora_expand, lib.moe_lora_release


class CpuShrunk:
    """x @ A.T of a site's rows; consumed by one `lora_expand`."""

    __slots__ = ("_address", "_keeps", "dtype", "num_rows", "site")

    def __init__(self, address: int, site: Site, num_rows: int, dtype: torch.dtype, keeps: object) -> None:
        self._address = address
        self._keeps = keeps
        self.site = site
        self.num_rows = num_rows
        self.dtype = dtype

    def redeem(self) -> int:
        """The library's address.  Raises ValueError the second time."""
        address, self._address = self._address, 0
        if not address:
            raise ValueError("this CpuShrunk was expanded before; call lora_shrink for another")
        return address

    def __del__(self, release=_release) -> None:
        if self._address:
            release(self._address)


def lora_shrink(operands: LoraOperands, *, kernel: str = "sgmv") -> CpuShrunk:
    """h = x_row @ A.T in fp32, for each row with an adapter and each module.

    x: fp32 or bf16, rows may be strided.  The arena must not change before the expand.  Raises ValueError for
    bad operands, or a matrix outside the arena.
    """
    x, ids, site, layer, token_slots, slots, arena = operands
    code = dtype_code(x)
    if ids is None:
        tokens = rows = token_slots.numel()
        top_k, ids_ptr = 1, None
    else:
        if ids.dim() != 2:
            raise ValueError(f"ids must be [T, K], not of shape {tuple(ids.shape)}")
        tokens, top_k = ids.shape
        rows = tokens * top_k
        ids_ptr = checked(ids, "ids", torch.int32, rows)
    constants = lora_site(site)
    tables = lora_slots(slots)
    if (
        x.dim() != 2
        or x.shape[1] != constants.in_features
        or (ids is None) != (constants.num_experts == 0)
        or not 0 <= layer < tables.num_layers
        or constants.last_entry > tables.num_entries
        or kernel not in KERNELS
    ):
        raise ValueError(library.shrink_error(operands, kernel))
    x_rows = x.shape[0]
    if x_rows != tokens:
        check_rows(x, tokens, top_k)
    arena_bytes = arena.numel()
    address = _shrink(
        KERNELS[kernel],
        code,
        _threads(),
        x.data_ptr(),
        row_stride(x),
        x_rows,
        ids_ptr,
        tokens,
        top_k,
        constants,
        layer,
        checked(token_slots, "token_slots", torch.int32, tokens),
        tables,
        checked(arena, "arena", torch.uint8, arena_bytes),
        arena_bytes,
    )
    if address < 0:
        raise ValueError(library.lora_error(address, operands))
    return CpuShrunk(address, site, rows, x.dtype, arena)


def lora_expand(shrunk: CpuShrunk, y: torch.Tensor, *, subtract: bool = False) -> None:
    """y[row, columns of module] += delta, delta = round(scale * h @ B), for each row with an adapter.

    The delta is rounded to y's dtype first: `lora_delta` gives the same bits.  y: [T, N] or [T*K, N] in x's
    dtype, or fp32 with an unrounded delta; rows may be strided.  subtract: y -= delta.  Raises ValueError for
    a bad y or a consumed CpuShrunk.
    """
    dtype = torch.float32 if y.dtype == torch.float32 else shrunk.dtype
    _redeem(shrunk, y, "y", dtype, -1.0 if subtract else 1.0)


def lora_delta(operands: LoraOperands, out: torch.Tensor, *, kernel: str = "sgmv") -> None:
    """out = delta of `lora_expand`, zero without an adapter.

    out: [T, N] or [T*K, N] in x's dtype, rows may be strided; unchanged by a ValueError.
    """
    shrunk = lora_shrink(operands, kernel=kernel)
    _redeem(shrunk, out, "out", shrunk.dtype, 1.0, overwrite=True)


def _redeem(
    shrunk: CpuShrunk, y: torch.Tensor, name: str, dtype: torch.dtype, sign: float, *, overwrite: bool = False
) -> None:
    site = shrunk.site
    if (
        y.dim() != 2
        or y.shape[0] != shrunk.num_rows
        or y.shape[1] < site.columns[-1] + site.out_features[-1]
        or y.dtype != dtype
        or not y.is_cpu
    ):
        raise ValueError(library.target_error(y, name, site, shrunk.num_rows, dtype))
    stride = row_stride(y)
    address = shrunk.redeem()
    if overwrite:
        y.zero_()
    _expand(_threads(), address, dtype_code(y), sign, y.data_ptr(), stride)


isa = library.isa

_MAX_ROWS = {"avx512_bf16": (128, 4096), "avx512": (32, 4096), "amx_bf16": (64, 4096), "avx2": (4096, 4096)}
LINEAR_MAX_ROWS = dict(zip((torch.bfloat16, torch.float32), _MAX_ROWS.get(isa(), (4, 4)), strict=True))
"""Most rows for `linear`, by dtype.  AVX-512, AMX: faster than torch up to there.  AVX2: for stable bits."""
QUANTISED_MAX_ROWS = LINEAR_MAX_ROWS | ({torch.bfloat16: 512} if isa() == "amx_bf16" else {})
"""For weights-only formats; above, a step dequantises the whole matrix."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias.  x: [T, H], rows may be strided.  weight: [N, H].  bias: [N].  Returns [T, N].

    One dtype, fp32 or bf16; sums in fp32.  Raises ValueError for bad operands.
    """
    code = dtype_code(x)
    rows, width = x.shape
    num_out = weight.shape[0]
    if weight.shape[1] != width or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(library.weight_error(x, weight))
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
    """`reference.expert_linear` in fp32 or bf16; rows of x may be strided.

    Raises ValueError for an id outside -1 .. E-1, or bad operands.
    """
    code = dtype_code(x)
    tokens, top_k = ids.shape
    experts, num_out, width = weight.shape
    if x.shape[1] != width or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(library.weight_error(x, weight))
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


def quantised_linear(
    x: torch.Tensor,
    weight: QuantisedOperand,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    num_out: int,
) -> torch.Tensor:
    """`linear` (ids None) or `expert_linear` over weights in the layout of `quantised.put`.

    Bits equal those over dequantised weights; dynamic formats follow torchao.
    """
    form, data = weight.form, weight.data
    code = dtype_code(x)
    rows, width = x.shape
    tokens, top_k = (rows, 1) if ids is None else ids.shape
    matrices = () if ids is None else (data.shape[0],)
    if not fits(weight, x.dtype, width, matrices, num_out):
        raise ValueError(library.quantised_error(x.dtype, width, weight, num_out))
    check_rows(x, tokens, top_k)
    out = torch.empty((tokens * top_k, num_out), dtype=x.dtype)
    experts = 1 if ids is None else data.shape[0]
    packed = packed_weights(weight)
    rest = (
        None if bias is None else checked(bias, "bias", x.dtype, experts * num_out),
        None if ids is None else checked(ids, "ids", torch.int32, tokens * top_k),
        *(tokens, top_k, experts, out.data_ptr(), num_out, width),
    )
    inputs = code, _threads(), x.data_ptr(), row_stride(x), rows
    if form.dynamic:
        values = packed.data, packed.scale, form.group_size
        refusal = lib.moe_lora_dynamic_linear(form.bits, *inputs, *values, *rest)
    else:
        refusal = lib.moe_lora_packed_linear(*inputs, packed, *rest)
    if refusal:
        raise ValueError(f"ids hold an expert outside -1 .. {experts - 1}")
    return out


_FORMATS = {"int8": 0, "fp8": 1, "int4": 2, "mxfp4": 3}


def packed_weights(weight: QuantisedOperand) -> library.PackedWeights:
    """The library's view.  Raises ValueError unless contiguous on the CPU."""
    form, data, scale, zero = weight
    return library.PackedWeights(
        checked(data, "data", data.dtype, data.numel()),
        checked(scale, "scale", scale.dtype, scale.numel()),
        None if zero is None else checked(zero, "zero", torch.int8, zero.numel()),
        *(form.group_size, form.row_group, _FORMATS.get(form.name, 0)),
        int(scale.dtype == torch.bfloat16),
    )


@functools.cache
def _parts(form: Format, matrices: tuple[int, ...], num_out: int, width: int, dtype: torch.dtype) -> Any:
    data, scale = ((*matrices, *size) for size in form.sizes(num_out, width))
    return data, scale, (*matrices, num_out, form.num_groups(width)), *form.dtypes(dtype)


def fits(
    weight: QuantisedOperand, dtype: torch.dtype, width: int, matrices: tuple[int, ...], num_out: int
) -> bool:
    """True for the shapes and dtypes of `Format`; int4's scales may be fp32."""
    form, data, scale, zero = weight
    data_shape, scale_shape, zero_shape, kind, scale_kind = _parts(form, matrices, num_out, width, dtype)
    return (
        data.shape == data_shape
        and scale.shape == scale_shape
        and data.dtype == kind
        and (scale.dtype == scale_kind or (scale.dtype == torch.float32 and form.name == "int4"))
        and (zero is None or (zero.shape == zero_shape and form.name in ("int4", "int8")))
    )


class StepAttention:
    """`paged_attention` of a step: reads tables and arena once.

    Raises ValueError for bad tables.
    """

    def __init__(self, step: StepTables, layout: KvLayout, arena: torch.Tensor) -> None:
        self._step, self._layout, self._arena = step, layout, arena
        self.dtype_code = library.DTYPE_CODES.get(layout.dtype, -1)
        num_seqs, table_stride = step.block_tables.shape
        self._pages = kv_pages(layout)
        self.tables = (
            checked(step.query_start, "query_start", torch.int32, num_seqs + 1),
            checked(step.seq_lens, "seq_lens", torch.int32, num_seqs),
            checked(step.block_tables, "block_tables", torch.int32, num_seqs * table_stride),
            *(num_seqs, table_stride, ctypes.addressof(self._pages), arena.data_ptr(), arena.numel()),
        )

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """As `reference.paged_attention`: [T, heads, head_dim].

        Rows may be strided.  Raises ValueError for bad operands.
        """
        layout = self._layout
        code = dtype_code(q)
        rows, heads, dim = q.shape
        kv_shape = (rows, layout.num_kv_heads, layout.head_dim)
        if (
            not (q.dtype == k.dtype == v.dtype == layout.dtype and dim == layout.head_dim and scale > 0)
            or not (k.shape == v.shape == kv_shape)
            or heads % layout.num_kv_heads
        ):
            operands = (q, k, v, sinks, scale, window, layer, self._step, layout, self._arena)
            raise ValueError(library.attention_error(AttentionOperands._make(operands)))
        if sinks is not None and sinks.dtype != torch.float32:
            sinks = sinks.float()
        out = torch.empty((rows, heads, dim), dtype=q.dtype)
        refusal = lib.moe_lora_paged_attention(
            *(code, _threads(), q.data_ptr(), row_stride(q), k.data_ptr(), row_stride(k)),
            *(v.data_ptr(), row_stride(v)),
            *(None if sinks is None else checked(sinks, "sinks", torch.float32, heads), scale, window, layer),
            *(*self.tables, rows, heads, out.data_ptr()),
        )
        if refusal:
            raise ValueError(library.step_error(refusal))
        return out


def paged_attention(operands: AttentionOperands) -> torch.Tensor:
    """`StepAttention` of a single layer."""
    q, k, v, sinks, scale, window, layer, step, layout, arena = operands
    return StepAttention(step, layout, arena)(layer, q, k, v, sinks, scale, window)


def delta_rule(
    qkv_TC: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    conv_CW: torch.Tensor,
    shape: DeltaShape,
    spans: tuple[torch.Tensor, torch.Tensor],
    pages_SP: torch.Tensor,
    arena: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S = exp(log_decay) * S, then S = S + k (beta * (v - k S)), and out = q S / sqrt(K), per value head.

    q, k, v: silu of the causal convolution of qkv; q and k have length 1.  spans: int64 [S, 3] first row,
    end, and 1 for a sequence's first rows; int64 [M, 2] marks, a sequence and an end of rows.  pages: int64,
    the state before in arena [pages, bytes], unchanged.  Returns out [T, N, V], zero outside the spans, and
    the states after, then at marks: fp32 [S + M, P, numbers of a page] from the last W - 1 rows of qkv, then
    S [N, K, V].  Bits do not depend on cuts, further sequences or threads.  Raises ValueError for bad
    operands.
    Source: Gated DeltaNet (arXiv 2412.06464), equation 10.
    """
    num_rows, num_heads = beta_TN.shape
    (num_seqs, num_pages), (spans_S3, marks_M2) = pages_SP.shape, spans
    num_pages_there, page_bytes = arena.shape
    is_short = num_seqs > 0 and num_pages * page_bytes < 4 * shape.state_floats
    if is_short or qkv_TC.shape != (num_rows, shape.conv_size):
        raise ValueError(
            f"qkv {tuple(qkv_TC.shape)} with {num_pages} pages of {page_bytes} bytes do not fit {shape}"
        )
    code, heads = dtype_code(qkv_TC), num_rows * num_heads
    states = torch.empty(num_seqs + len(marks_M2), num_pages, page_bytes // 4)
    out_TNV = qkv_TC.new_zeros(num_rows, num_heads, shape.v_dim)
    refusal = lib.moe_lora_delta_rule(
        *(code, _threads(), qkv_TC.data_ptr(), row_stride(qkv_TC)),
        checked(conv_CW, "conv", qkv_TC.dtype, shape.conv_size * shape.conv_width),
        checked(log_decay_TN, "log_decay", torch.float32, heads),
        checked(beta_TN, "beta", torch.float32, heads),
        ctypes.byref(library.DeltaSizes(*(getattr(shape, name) for name in library.DELTA_SIZES))),
        *(checked(spans_S3, "spans", torch.int64, 3 * num_seqs), num_seqs),
        *(checked(marks_M2, "marks", torch.int64, marks_M2.numel()), len(marks_M2)),
        *(pages_SP.data_ptr(), row_stride(pages_SP)),
        *(checked(arena, "arena", torch.uint8, arena.numel()), page_bytes, num_pages_there * page_bytes),
        *(num_rows, states.data_ptr(), num_pages * (page_bytes // 4), out_TNV.data_ptr()),
    )
    if refusal:
        raise ValueError(library.step_error(refusal))
    return out_TNV, states
