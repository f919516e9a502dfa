# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ library, and converts arguments."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import mmap
import os
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from moe_lora.kernels.operands import AttentionOperands, KvLayout, LoraOperands, SlotTable
from moe_lora.kernels.quantised import QuantisedOperand

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

_MAX_MODULES = 8
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


class _Site(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_modules", "num_experts", "entry_base", "in_features")),
        ("column", c_int64 * _MAX_MODULES),
        ("out_features", c_int64 * _MAX_MODULES),
    ]
    last_entry: int


class _Slots(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("a_offset", "b_offset", "lora_rank", "scale")),
        *((name, c_int64) for name in ("num_slots", "num_layers", "num_entries")),
    ]


class _Pages(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_kv_heads", "head_dim", "block_size", "page_bytes")),
        *((name, c_int64) for name in ("layer_bytes", "value_bytes")),
    ]


class PackedWeights(ctypes.Structure):
    """PackedWeights of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("data", "scale", "zero")),
        *((name, c_int64) for name in ("group", "row_group")),
        *((name, c_int32) for name in ("format", "scale_dtype")),
    ]


class SiteWeights(ctypes.Structure):
    """SiteWeights of csrc/kernels.h."""

    _fields_ = [
        *((name, c_int32) for name in ("dtype", "kind", "dynamic_bits")),
        ("packed", PackedWeights),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("num_experts", "first_expert", "num_out", "width")),
    ]


class SiteRows(ctypes.Structure):
    """SiteRows of csrc/kernels.h."""

    _fields_ = [
        ("site", POINTER(_Site)),
        ("token_slots", c_void_p),
        ("slots", POINTER(_Slots)),
        ("arena", c_void_p),
        ("arena_bytes", c_int64),
        ("kernel", c_int32),
    ]


DELTA_SIZES = ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "conv_width")


class DeltaSizes(ctypes.Structure):
    """DeltaSizes of csrc/kernels.h."""

    _fields_ = [(name, c_int64) for name in DELTA_SIZES]


def _load() -> ctypes.CDLL:
    spec = importlib.util.find_spec("moe_lora.kernels.cpu._cpu")
    if spec is None or spec.origin is None:
        raise ImportError(
            "the CPU kernels are not built; install the package (pip install .), or in a checkout run "
            "python setup.py build_ext --inplace"
        )
    library = ctypes.CDLL(spec.origin)
    p, n, i = c_void_p, c_int64, c_int32
    site, slots, weights = POINTER(_Site), POINTER(_Slots), POINTER(PackedWeights)
    library.moe_lora_isa.restype = c_char_p
    library.moe_lora_set_isa.argtypes = [c_char_p]
    library.moe_lora_linear.argtypes = [i, i, p, n, p, p, p, n, n, n]
    library.moe_lora_expert_linear.argtypes = [i, i, p, n, n, p, p, p, n, n, n, p, n, n]
    library.moe_lora_packed_linear.argtypes = [i, i, p, n, n, weights, p, p, n, n, n, p, n, n]
    library.moe_lora_dynamic_linear.argtypes = [i, i, i, p, n, n, p, p, n, p, p, n, n, n, p, n, n]
    library.moe_lora_shrink.argtypes = [i, i, i, p, n, n, p, n, n, site, n, p, slots, p, n]
    library.moe_lora_shrink.restype = n
    library.moe_lora_expand.argtypes = [i, p, i, c_float, p, n]
    library.moe_lora_expand.restype = None
    library.moe_lora_site_linear.argtypes = [i, p, p, n, p, n, n, p, n, n, p]
    library.moe_lora_release.argtypes = [p]
    library.moe_lora_release.restype = None
    library.moe_lora_draw.argtypes = [i, p, n, n, p, p, p]
    library.moe_lora_draw.restype = None
    library.moe_lora_mask.argtypes = [i, p, n, p, n, p, n]
    library.moe_lora_mask.restype = None
    library.moe_lora_delta_rule.argtypes = [
        *(i, i, p, n, p, p, p, p),
        *(p, n, p, n, p, n, p, n, n, n, p, n, p),
    ]
    library.moe_lora_paged_attention.argtypes = [
        *(i, i, p, n, p, n, p, n, p, c_float, n, n),
        *(p, p, p, n, n, p, p, n, n, n, p),
    ]
    return library


def isa() -> str:
    """Instruction set: amx_bf16, avx512_bf16, avx512, avx2, portable (or amx_emulated, in tests)."""
    return lib.moe_lora_isa().decode()


def set_isa(name: str) -> None:
    """Use a lower instruction set.  Raises ValueError if the processor lacks it."""
    if lib.moe_lora_set_isa(name.encode()) != 0:
        raise ValueError(
            f"MOE_LORA_ISA={name!r} is unknown or this processor lacks it; choose one of amx_bf16, "
            "avx512_bf16, avx512, avx2, portable, or unset it"
        )


def dtype_code(x: torch.Tensor) -> int:
    """The library's code of x's dtype.  Raises ValueError for other dtypes and devices."""
    code = DTYPE_CODES.get(x.dtype)
    if code is None or not x.is_cpu:
        raise ValueError(
            f"the CPU kernels take fp32 and bf16 tensors on the CPU, not {x.dtype} on {x.device}"
        )
    return code


def row_stride(x: torch.Tensor) -> int:
    """Elements from row to row.  Raises ValueError unless contiguous."""
    stride = x.stride()
    inner = len(stride) == 3 and x.shape[1] > 1 and stride[1] != x.shape[2]
    if inner or (stride[-1] != 1 and x.shape[-1] > 1):
        raise ValueError(f"rows must be contiguous; shape {tuple(x.shape)} has strides {stride}")
    return stride[0]


def checked(x: torch.Tensor, name: str, dtype: torch.dtype, count: int) -> int:
    """Address of a contiguous CPU tensor.  Raises ValueError for other dtypes, sizes, layouts or devices."""
    if x.dtype != dtype or not x.is_contiguous() or x.numel() != count or not x.is_cpu:
        raise ValueError(
            f"{name} must be contiguous {dtype} of {count} elements on the CPU, not {x.dtype} of shape "
            f"{tuple(x.shape)} and strides {x.stride()} on {x.device}"
        )
    return x.data_ptr()


def check_rows(x: torch.Tensor, tokens: int, top_k: int) -> None:
    """Raise ValueError unless x has a row per token or output."""
    if x.shape[0] != tokens and x.shape[0] != tokens * top_k:
        raise ValueError(
            f"x has {x.shape[0]} rows; {tokens} tokens x {top_k} experts need {tokens} or {tokens * top_k}"
        )


_SLOT_TABLES = {
    "a_offset": torch.int64,
    "b_offset": torch.int64,
    "lora_rank": torch.int32,
    "scale": torch.float32,
}
_sites: dict[int, tuple[Site, _Site]] = {}
_pages: dict[int, tuple[KvLayout, _Pages]] = {}


def lora_site(site: Site) -> _Site:
    """The library's constants, cached with the site."""
    known = _sites.get(id(site))
    if known is not None:
        return known[1]
    count = len(site.modules)
    if count > _MAX_MODULES:
        raise ValueError(f"site {site.name!r} has {count} modules; the CPU kernels take up to {_MAX_MODULES}")
    numbers = _Site(count, site.num_experts, site.entry_base, site.in_features)
    numbers.column[:count] = site.columns
    numbers.out_features[:count] = site.out_features
    numbers.last_entry = site.entry_base + max(1, site.num_experts) * count
    _sites[id(site)] = (site, numbers)
    return numbers


def lora_slots(slots: SlotTable) -> _Slots:
    """The library's view, cached with the table."""
    known = slots.__dict__.get("_cpu_view")
    if known is None:
        cells = slots.lora_rank.numel()
        addresses = (
            checked(getattr(slots, name), name, dtype, cells) for name, dtype in _SLOT_TABLES.items()
        )
        known = slots.__dict__["_cpu_view"] = _Slots(*addresses, *slots.lora_rank.shape)
    return known


def kv_pages(layout: KvLayout) -> _Pages:
    """The library's constants, cached with the layout."""
    known = _pages.get(id(layout))
    if known is None:
        sizes = (layout.num_kv_heads, layout.head_dim, layout.block_size)
        numbers = _Pages(*sizes, layout.page_bytes, layout.layer_bytes, layout.value_bytes)
        known = _pages[id(layout)] = (layout, numbers)
    return known[1]


lib = _load()
if os.environ.get("MOE_LORA_ISA"):
    set_isa(os.environ["MOE_LORA_ISA"])


_LEAST_BYTES = 4 << 20
_libc = ctypes.CDLL(None)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages behind a CPU tensor, for fewer TLB misses."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not tensor.is_cpu or tensor.nbytes < _LEAST_BYTES:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))


def give_memory_back(tensor: torch.Tensor) -> None:
    """Free the pages behind a contiguous CPU tensor; values become undefined."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))


# Refusal codes of csrc/kernels.h.
_BAD_EXPERT, _BAD_SLOT, _BAD_OFFSET, _BAD_PAGE = -2, -3, -4, -5


def weight_error(x: torch.Tensor, weight: torch.Tensor) -> str:
    """The fault in operands of a linear layer."""
    return (
        f"weight must be contiguous {x.dtype} with rows of {x.shape[-1]}, not {weight.dtype} of shape "
        f"{tuple(weight.shape)} and strides {weight.stride()}"
    )


def quantised_error(dtype: torch.dtype, width: int, weight: QuantisedOperand, num_out: int) -> str:
    """The fault in operands of a quantised layer."""
    form, data, scale, zero = weight
    zeros = "no zeros" if zero is None else f"zeros {zero.dtype} of {tuple(zero.shape)}"
    return (
        f"{form.name} weights of {num_out} outputs and {width} inputs are {form.dtypes(dtype)} of "
        f"shapes {form.sizes(num_out, width)} per matrix, not {data.dtype} of {tuple(data.shape)}, "
        f"{scale.dtype} of {tuple(scale.shape)} and {zeros}"
    )


def shrink_error(operands: LoraOperands, kernel: str) -> str:
    x, ids, site, layer, _, slots, _ = operands
    _, num_layers, num_entries = slots.lora_rank.shape
    if x.dim() != 2 or x.shape[1] != site.in_features:
        return f"x must be [rows, {site.in_features}] at site {site.name!r}, not of shape {tuple(x.shape)}"
    if (ids is None) != (site.num_experts == 0):
        given = "no ids" if ids is None else "ids"
        return f"{given} given, but site {site.name!r} has {site.num_experts} experts"
    if not 0 <= layer < num_layers:
        return f"layer={layer} is outside 0 .. {num_layers - 1} of the slot table"
    from moe_lora.config import LORA_KERNELS

    if kernel not in LORA_KERNELS:
        return f"kernel={kernel!r} is unknown; choose one of {', '.join(LORA_KERNELS)}"
    return f"site {site.name!r} needs more entries than the {num_entries} of the slot table"


def lora_error(refusal: int, operands: LoraOperands) -> str:
    """The fault of a shrink, by code."""
    if refusal == _BAD_EXPERT:
        return f"ids hold an expert outside -1 .. {max(1, operands.site.num_experts) - 1}"
    if refusal == _BAD_SLOT:
        return f"token_slots holds a slot outside -1 .. {operands.slots.num_slots - 1}"
    assert refusal == _BAD_OFFSET, refusal
    return _offset_error(operands)


def _offset_error(operands: LoraOperands) -> str:
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
    width = site.columns[-1] + site.out_features[-1]
    return (
        f"{name} must be {dtype} on the CPU with {num_rows} rows of at least {width} columns at site "
        f"{site.name!r}, not {y.dtype} on {y.device} of shape {tuple(y.shape)}"
    )


def attention_error(operands: AttentionOperands) -> str:
    q, k, v, _, scale, _, _, _, layout, _ = operands
    return (
        f"q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}, v {v.dtype} {tuple(v.shape)} and "
        f"scale={scale} do not fit {layout}; need its dtype and head_dim, k and v with its "
        "num_kv_heads, heads a multiple of these, and a positive scale"
    )


def step_error(refusal: int) -> str:
    """The fault in step tables, by code."""
    if refusal == _BAD_PAGE:
        return "block_tables hold a page outside the arena"
    return "query_start must ascend within the rows, and seq_lens cover the rows and fit the block table"
