# SPDX-License-Identifier: Apache-2.0
"""A LoRA site of a step in one call of the library.

Legend: see `cpu`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from moe_lora.core.shape import Site
from moe_lora.kernels.operands import SlotTable
from moe_lora.kernels.quantised import QuantisedOperand

from . import library
from .cpu import KERNELS, LINEAR_MAX_ROWS, QUANTISED_MAX_ROWS, StepAttention, fits, packed_weights
from .library import PackedWeights, checked, lib, lora_site, lora_slots

_threads = torch.get_num_threads
_site_linear = lib.moe_lora_site_linear
_PLAIN, _PACKED, _DYNAMIC = range(3)
logger = logging.getLogger(__name__)
_MAX_SITES = 8
_ANY_NUMBER = 2**63 - 1


@dataclass(frozen=True, eq=False)
class LoraRows:
    """Rows with deltas at a site; site: None without rows."""

    table: library.SiteRows
    address: int
    site: Site | None = None
    num_rows: int = 0
    num_layers: int = 0
    keeps: object = None


def lora_rows(
    site: Site, token_slots: torch.Tensor, slots: SlotTable, arena: torch.Tensor, kernel: str = "sgmv"
) -> LoraRows:
    """`LoraRows` of operands.  Raises ValueError for bad operands."""
    constants, tables, num_rows = lora_site(site), lora_slots(slots), len(token_slots)
    if constants.last_entry > tables.num_entries:
        raise ValueError(
            f"site {site.name!r} needs more entries than the {tables.num_entries} of the slot table"
        )
    table = library.SiteRows(
        ctypes.pointer(constants),
        checked(token_slots, "token_slots", torch.int32, num_rows),
        ctypes.pointer(tables),
        *(checked(arena, "arena", torch.uint8, arena.numel()), arena.numel(), KERNELS[kernel]),
    )
    keeps = token_slots, slots, arena
    return LoraRows(table, ctypes.addressof(table), site, num_rows, tables.num_layers, keeps)


_NO_TABLE = library.SiteRows()
NO_ROWS = LoraRows(_NO_TABLE, ctypes.addressof(_NO_TABLE))


class SiteLinear:
    """x @ weight.T + bias + deltas of a site in a layer.

    weight: [N, H] or [E, N, H], or a quantised operand.  bias: [N] or [E, N].  first_expert: model number of
    the first expert; None: a dense site.  Raises ValueError for bad operands.
    """

    def __init__(
        self,
        layer: int,
        dtype: torch.dtype,
        weight: torch.Tensor | QuantisedOperand,
        bias: torch.Tensor | None,
        width: int,
        num_out: int,
        first_expert: int | None,
    ) -> None:
        self._keeps = weight, bias
        self._layer, self._dtype, self._width, self._num_out = layer, dtype, width, num_out
        self._has_experts = first_expert is not None
        data = weight.data if isinstance(weight, QuantisedOperand) else weight
        self.address_of_data = data.data_ptr()
        experts = (data.shape[0],) if self._has_experts else ()
        if isinstance(weight, QuantisedOperand):
            if not fits(weight, dtype, width, experts, num_out):
                raise ValueError(library.quantised_error(dtype, width, weight, num_out))
            kind, packed = (_DYNAMIC if weight.form.dynamic else _PACKED), packed_weights(weight)
        else:
            num_weights = (*experts, 1)[0] * num_out * width
            kind, packed = _PLAIN, PackedWeights(data=checked(weight, "weight", dtype, num_weights))
        most = LINEAR_MAX_ROWS if kind == _PLAIN else QUANTISED_MAX_ROWS
        self.max_rows = None if self._has_experts or kind == _DYNAMIC else most[dtype]
        bias_ptr = checked(bias, "bias", dtype, (*experts, 1)[0] * num_out) if bias is not None else None
        bits = weight.form.bits if isinstance(weight, QuantisedOperand) else 0
        self._table = library.SiteWeights(
            *(library.DTYPE_CODES[dtype], kind, bits, packed, bias_ptr),
            *((*experts, 0)[0], first_expert or 0, num_out, width),
        )
        self.address = ctypes.addressof(self._table)
        self._site: Site | None = None

    def __call__(self, x: torch.Tensor, ids: torch.Tensor | None, rows: LoraRows) -> torch.Tensor | None:
        """[T, N], or [T*K, N] with ids; None for unsupported operands.

        x: [T, H] or [T*K, H].  ids: [T, K] int32, -1: none.
        """
        num_rows, width = x.shape
        if ids is None:
            tokens, top_k, ids_ptr = num_rows, 1, None
        else:
            tokens, top_k = ids.shape
            if (
                num_rows not in (tokens, tokens * top_k)
                or ids.dtype != torch.int32
                or not ids.is_contiguous()
            ):
                return None
            ids_ptr = ids.data_ptr()
        stride = x.stride()
        if (
            x.dtype != self._dtype
            or width != self._width
            or stride[1] != 1
            or self._has_experts == (ids is None)
            or (self.max_rows is not None and num_rows > self.max_rows)
            or (rows.site is not None and not self._takes(rows, tokens))
        ):
            return None
        out = torch.empty((tokens * top_k, self._num_out), dtype=self._dtype)
        refusal = _site_linear(
            *(_threads(), self.address, rows.address, self._layer),
            *(x.data_ptr(), stride[0], num_rows, ids_ptr, tokens, top_k, out.data_ptr()),
        )
        return None if refusal else out

    def _takes(self, rows: LoraRows, tokens: int) -> bool:
        site = rows.site
        if rows.num_rows != tokens or not self._layer < rows.num_layers:
            return False
        if site is not self._site:
            assert site is not None
            end = site.columns[-1] + site.out_features[-1]
            fits_in = site.in_features == self._width and end <= self._num_out
            if not fits_in or self._has_experts != (site.num_experts > 0):
                return False
            self._site = site
        return True


class _SeenSite(ctypes.Structure):
    _fields_ = [("weights", c_void_p), ("data", c_void_p), ("max_rows", c_int64)]


class _StepRows(ctypes.Structure):
    _fields_ = [("rows", c_void_p), ("num_rows", c_int64), ("num_layers", c_int64)]


class _StepAttention(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query_start", "seq_lens", "block_tables")),
        *((name, c_int64) for name in ("num_seqs", "table_stride")),
        *((name, c_void_p) for name in ("pages", "arena")),
        ("arena_bytes", c_int64),
        ("dtype", c_int32),
    ]


class _StepCalls(ctypes.Structure):
    _fields_ = [
        *(("num_sites", c_int64), ("sites", c_void_p), ("rows", c_void_p)),
        ("attention", _StepAttention),
    ]


class StepCalls:
    """An engine's tables for C++.  address: for channels, during this object's life."""

    def __init__(self, num_layers: int) -> None:
        self._sites = (_SeenSite * (num_layers * _MAX_SITES))()
        self._rows = (_StepRows * _MAX_SITES)()
        places = (ctypes.addressof(table) for table in (self._sites, self._rows))
        self._calls = _StepCalls(_MAX_SITES, *places)
        self._keeps: object = None
        self.address = ctypes.addressof(self._calls)

    def begin_step(self, rows: Sequence[LoraRows | None], attention: StepAttention) -> None:
        """Set the rows of each site, for all layers; None: computed in Python."""
        self._calls.attention = _StepAttention(*attention.tables, attention.dtype_code)
        ctypes.memset(self._rows, 0, ctypes.sizeof(self._rows))
        for site, here in enumerate(rows[:_MAX_SITES]):
            if here is not None:
                self._rows[site] = _StepRows(here.address, here.num_rows, here.num_layers)
        self._keeps = rows, attention

    def see(self, layer: int, site: int, linear: SiteLinear) -> None:
        """Set the site's layer.  linear: must live until replaced."""
        if site < _MAX_SITES:
            max_rows = _ANY_NUMBER if linear.max_rows is None else linear.max_rows
            table = _SeenSite(linear.address, linear.address_of_data, max_rows)
            self._sites[layer * _MAX_SITES + site] = table


_TABLES = (_SeenSite, _StepRows, _StepAttention, _StepCalls)


def _wanted() -> str:
    return f"torch {torch.__version__} and tables of {[ctypes.sizeof(one) for one in _TABLES]} bytes"


def _built_for(operations: ctypes.CDLL) -> str:
    sizes = (c_int64 * len(_TABLES))()
    operations.moe_lora_table_bytes(sizes)
    operations.moe_lora_torch_version.restype = c_char_p
    return f"torch {operations.moe_lora_torch_version().decode()} and tables of {list(sizes)} bytes"


def _load() -> ctypes.CDLL | None:
    """Registers the operations; None if not built for this torch."""
    spec = importlib.util.find_spec("moe_lora.kernels.cpu._operations")
    if spec is None or spec.origin is None:
        logger.info("operations of a CPU step run in Python: moe_lora was built without torch's headers")
        return None
    try:
        operations = ctypes.CDLL(spec.origin)
        found = _built_for(operations)
    except (OSError, AttributeError):
        found = "others"
    if found != (wanted := _wanted()):
        logger.warning(
            "operations of a CPU step run in Python, which is slower: %s was built for %s, not for %s; "
            "install moe_lora again beside this torch, without build isolation",
            *(spec.origin, found, wanted),
        )
        return None
    kernels = library.lib.moe_lora_site_linear, library.lib.moe_lora_paged_attention
    operations.moe_lora_register_operations(*(ctypes.cast(kernel, c_void_p) for kernel in kernels))
    return operations


has_step_calls = _load() is not None
