# SPDX-License-Identifier: Apache-2.0
"""The deltas of one request, on a server rank or as the instance's fallback.

Legend: T token rows, K experts per token, R rows of the answer, N output width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.kernels.lora import lora_delta, lora_expand, lora_shrink
from moe_lora.kernels.operands import LoraOperands, SlotTable
from moe_lora.lora.row_routing import RoutedAdapter

from .session import DeltaRequest

_MAX_MAPPED = 64
"""Most adapters mapped by an instance for its own computation, least recently used out first."""

_MAX_LOGGED = 256


def request_deltas(
    request: DeltaRequest,
    shape: ModelShape,
    slot: np.ndarray,
    slots: SlotTable,
    arena: torch.Tensor,
    out: torch.Tensor,
    *,
    kernel: str = "sgmv",
    max_lora_rank: int | None = None,
) -> None:
    """out [R, N] = the deltas of the request's rows; zero for slot -1.

    kernel, max_lora_rank: as in `kernels.lora`.
    """
    device, ids = arena.device, request.ids
    token_slots = torch.from_numpy(np.ascontiguousarray(slot)).to(device)
    ids_there = None if ids is None else torch.from_numpy(np.ascontiguousarray(ids)).to(device)
    place = shape.sites[request.site], request.layer, token_slots, slots, arena
    operands = LoraOperands(request.x.to(device), ids_there, *place)
    target = out if out.device == device else torch.empty_like(out, device=device)
    compute = partial(lora_delta, operands, kernel=kernel, max_lora_rank=max_lora_rank)
    compute_chosen(ids, compute, target)
    if target is not out:
        out.copy_(target)


def compute_chosen(
    ids: np.ndarray | None, compute: Callable[[torch.Tensor], object], out: torch.Tensor
) -> None:
    """out [R, N] = the rows with an expert of the deltas that `compute` fills.

    ids: [T, K], -1 for the other rows; None at a dense site: all rows.  compute: fills [T * K, N], or [R, N].
    """
    if ids is None or len(out) == ids.size:
        compute(out)
        return
    deltas = out.new_empty(ids.size, out.shape[1])
    compute(deltas)
    rows = torch.from_numpy(np.flatnonzero(ids.reshape(-1) >= 0)).to(out.device)
    torch.index_select(deltas, 0, rows, out=out)


class FailureLog:
    """Logs the first failure of each adapter content, and remembers the latest `_MAX_LOGGED` contents."""

    def __init__(self, logger: logging.Logger, consequence: str) -> None:
        self._logger = logger
        self._consequence = consequence
        self._logged: dict[str, None] = {}

    def add(self, contents: Iterable[str], error: Exception) -> None:
        """A request for these contents failed.  Any thread."""
        contents = list(contents) or ["of unknown content"]
        if all(content in self._logged for content in contents):
            return
        self._logged.update(dict.fromkeys(contents))
        for oldest in list(self._logged)[:-_MAX_LOGGED]:
            self._logged.pop(oldest, None)
        adapters = ", ".join(contents)
        self._logger.error("adapter %s: %s; %s", adapters, error, self._consequence, exc_info=error)


class HostDeltas:
    """Deltas from adapters in host memory, by the CPU library.

    Equal in bits to a server on CPU with any kernel; close to a server on CUDA.
    """

    def __init__(self, shape: ModelShape, store: HostStore) -> None:
        self._shape = shape
        self._store = store
        self._adapter = lru_cache(_MAX_MAPPED)(self._map)

    def compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        out: torch.Tensor,
    ) -> None:
        """As `request_deltas`; row_adapter [T]: index into `adapters` of each row of x, -1: zeros.

        Raises AdapterError, with the content hash, for a bad adapter.
        """
        compute_chosen(request.ids, partial(self._compute, request, adapters, row_adapter), out)

    def _compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        deltas: torch.Tensor,
    ) -> None:
        ids = None if request.ids is None else torch.from_numpy(np.ascontiguousarray(request.ids))
        deltas.zero_()
        for index in np.unique(row_adapter[row_adapter >= 0]).tolist():
            arena, table = self._layer(adapters[index].content_hash, request.layer)
            slot = torch.from_numpy(np.where(row_adapter == index, 0, -1).astype(np.int32))
            site = self._shape.sites[request.site]
            lora_expand(lora_shrink(LoraOperands(request.x, ids, site, 0, slot, table, arena)), deltas)

    def _map(self, content_hash: str) -> tuple[PackedAdapter, dict[int, SlotTable]]:
        return self._store.get(content_hash, content_hash), {}

    def _layer(self, content_hash: str, number: int) -> tuple[torch.Tensor, SlotTable]:
        """The data of one layer, and its offsets as a table of one slot.  Raises AdapterError."""
        packed, tables = self._adapter(content_hash)
        try:
            layer = packed.layers[number]
            if number not in tables:
                table = SlotTable(1, 1, self._shape.num_entries, torch.device("cpu"))
                table.write_layer(
                    0, 0, layer.table, layer.scale, layer.data.element_size(), range(layer.nbytes)
                )
                tables[number] = table
            return layer.data.view(torch.uint8), tables[number]
        except Exception as error:
            raise AdapterError(f"layer {number} of adapter {content_hash} can't be used: {error}") from error
