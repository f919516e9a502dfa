# SPDX-License-Identifier: Apache-2.0
"""Tables of a step for the operations of csrc/operations.cpp, which compute without a call into Python.

A call into Python costs more than a small kernel.  Channels carry the tables' address.  The operation in
Python computes the rest (remote deltas, new weights, operands that don't fit), and everything without that
library; same bits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p

import torch

from . import library
from .cpu import StepAttention
from .site_linear import LoraRows, SiteLinear

logger = logging.getLogger(__name__)
_MAX_SITES = 8
_ANY_NUMBER = 2**63 - 1


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
    """The tables of one engine.  address: for its channels, valid during this object's life."""

    def __init__(self, num_layers: int) -> None:
        self._sites = (_SeenSite * (num_layers * _MAX_SITES))()
        self._rows = (_StepRows * _MAX_SITES)()
        places = (ctypes.addressof(table) for table in (self._sites, self._rows))
        self._calls = _StepCalls(_MAX_SITES, *places)
        self._keeps: object = None
        self.address = ctypes.addressof(self._calls)

    def begin_step(self, rows: Sequence[LoraRows | None], attention: StepAttention) -> None:
        """rows: by site, the same in all layers; None: in Python."""
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
    """Registers the operations; None if not built, or built for another torch."""
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


are_built = _load() is not None
