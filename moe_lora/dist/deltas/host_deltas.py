# SPDX-License-Identifier: Apache-2.0
"""Deltas computed on the host's cores.

Legend: T token rows, K experts per token, R rows of the answer, N output width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, entries_of_experts, shard_layer
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.kernels.lora import lora_delta, lora_expand, lora_shrink
from moe_lora.kernels.operands import LoraOperands, SlotTable
from moe_lora.lora.local import LayerPart, part_bytes
from moe_lora.lora.row_routing import RoutedAdapter

from .session import DeltaRequest

_MAX_MAPPED, _MAX_CUT = 64, 16
"""Most adapters mapped by an instance; likewise copied, where ranks divide matrices."""
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
    """out [R, N] = the deltas of the request's rows; zero for slot -1."""
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
    """out [R, N] = the rows with an expert of `compute`'s deltas, [T * K, N] or [R, N].

    ids: [T, K], -1 for other rows; None: all rows.
    """
    if ids is None or len(out) == ids.size:
        compute(out)
        return
    deltas = out.new_empty(ids.size, out.shape[1])
    compute(deltas)
    rows = torch.from_numpy(np.flatnonzero(ids.reshape(-1) >= 0)).to(out.device)
    torch.index_select(deltas, 0, rows, out=out)


class FailureLog:
    """Logs the first failure of each adapter content."""

    def __init__(self, logger: logging.Logger, consequence: str) -> None:
        self._logger = logger
        self._consequence = consequence
        self._logged: dict[str, None] = {}

    def add(self, contents: Iterable[str], error: Exception) -> None:
        """Record a failed request.  Any thread."""
        contents = list(contents) or ["of unknown content"]
        if all(content in self._logged for content in contents):
            return
        self._logged.update(dict.fromkeys(contents))
        for oldest in list(self._logged)[:-_MAX_LOGGED]:
            self._logged.pop(oldest, None)
        adapters = ", ".join(contents)
        self._logger.error("adapter %s: %s; %s", adapters, error, self._consequence, exc_info=error)


class HostDeltas:
    """Deltas from host memory, bit-equal to a server on CPU, close to a server on CUDA.

    shard: as in `FrameLayout`; parts are copies.
    """

    def __init__(self, shape: ModelShape, store: HostStore, shard: ModelShard | None = None) -> None:
        self._shape = shape
        self._store = store
        self._shard = shard
        self._kept = None if shard is None else entries_of_experts(shard.whole, shard.experts)
        self._adapter = lru_cache(_MAX_MAPPED if shard is None else _MAX_CUT)(self._map)

    def compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        out: torch.Tensor,
    ) -> None:
        """As `request_deltas`; row_adapter [T]: index into `adapters`, -1: zeros.

        Raises AdapterError, with the content hash.
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

    def _map(self, content_hash: str) -> tuple[PackedAdapter, dict[int, tuple[torch.Tensor, SlotTable]]]:
        return self._store.get(content_hash, content_hash), {}

    def _layer(self, content_hash: str, number: int) -> tuple[torch.Tensor, SlotTable]:
        """Data, and a table of one slot.  Raises AdapterError."""
        packed, layers = self._adapter(content_hash)
        try:
            if number not in layers:
                part: LayerPart = packed.layers[number]
                if self._shard is not None and self._kept is not None:
                    part = shard_layer(packed.layers[number], self._shard.whole, self._kept, self._shard)
                data = part_bytes(packed.layers[number], part)
                table = SlotTable(1, 1, self._shape.num_entries, torch.device("cpu"))
                itemsize = packed.layers[number].data.element_size()
                table.write_layer(0, 0, part.table, part.scale, itemsize, range(len(data)))
                layers[number] = data, table
            return layers[number]
        except Exception as error:
            raise AdapterError(f"layer {number} of adapter {content_hash} can't be used: {error}") from error


logger = logging.getLogger(__name__)


class HostCompute(Protocol):
    """Computes deltas on the host.  num_tokens: per piece."""

    num_tokens: int

    def compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        out: torch.Tensor,
    ) -> None: ...

    def close(self) -> None:
        """Stop; no further calls."""
        ...


class OnHost:
    """A request's rows on the host, in pieces.

    tokens: [T] bool.  rows: of the answer.  deltas: [number of rows, N].  wanted: a session waits.
    """

    def __init__(
        self, request: DeltaRequest, tokens: np.ndarray, adapters: Sequence[RoutedAdapter], width: int
    ) -> None:
        """tokens: [T] adapter of each token, -1: not for the host."""
        self.tokens = tokens >= 0
        token_of = np.arange(len(tokens)) if request.ids is None else np.nonzero(request.ids >= 0)[0]
        self.rows = torch.from_numpy(np.flatnonzero(self.tokens[token_of]))
        self.deltas = torch.empty(len(self.rows), width, dtype=request.x.dtype)
        self.done, self.wanted = False, True
        self.error: Exception | None = None
        self.adapters = adapters
        self._row_adapter = tokens[self.tokens]
        # Copies: the session's memory may go.
        self._request = _some(request, np.flatnonzero(self.tokens))
        self._next_token = self._next_row = 0

    def compute_piece(self, host: HostCompute) -> None:
        """Compute num_tokens more tokens."""
        first, self._next_token = self._next_token, self._next_token + host.num_tokens
        tokens = np.arange(len(self._row_adapter))[first : self._next_token]
        piece = _some(self._request, tokens)
        start, self._next_row = self._next_row, self._next_row + piece.num_rows
        out = self.deltas[start : self._next_row]
        host.compute(piece, self.adapters, self._row_adapter[tokens], out)
        self.done = self._next_token >= len(self._row_adapter)


def _some(request: DeltaRequest, tokens: np.ndarray) -> DeltaRequest:
    ids = None if request.ids is None else request.ids[tokens]
    return replace(
        request,
        num_rows=len(tokens) if ids is None else int(np.count_nonzero(ids >= 0)),
        slot=request.slot[tokens],
        generation=request.generation[tokens],
        ids=ids,
        x=request.x[torch.from_numpy(tokens)],
    )


class HostShare:
    """At most one request per session, in a thread; called by the data loop's thread.

    Sessions take turns of one piece.  on_done: called in this class's thread for a finished request.
    """

    def __init__(self, shape: ModelShape, host: HostCompute, on_done: Callable[[], None]) -> None:
        self._shape = shape
        self._host = host
        self._on_done = on_done
        self._thread = ThreadPoolExecutor(1, "host-share")
        self._of: dict[object, OnHost | None] = {}
        """None: not computable here."""
        self._failures = FailureLog(logger, "the host can't compute its rows, so instances do")

    def begin(
        self,
        session: object,
        request: DeltaRequest,
        here: np.ndarray,
        contents: Mapping[int, tuple[int, RoutedAdapter]],
    ) -> None:
        """Compute the rows not `here` ([T] bool), if their adapters are known.

        contents: generation and adapter by slot.
        """
        row_adapter = np.full(len(here), -1)
        adapters: list[RoutedAdapter] = []
        for slot in set(request.slot[~here].tolist()):
            generation, adapter = contents.get(slot, (-1, None))
            of_slot = ~here & (request.slot == slot)
            if adapter is None or (request.generation[of_slot] != generation).any():
                return
            row_adapter[of_slot] = len(adapters)
            adapters.append(adapter)
        width = self._shape.sites[request.site].total_out_features
        try:
            self._of[session] = on_host = OnHost(request, row_adapter, adapters, width)
            self._thread.submit(self._compute, on_host)
        except Exception as error:
            self._of[session] = None
            self._failures.add((adapter.content_hash for adapter in adapters), error)

    def _compute(self, on_host: OnHost) -> None:
        if not on_host.wanted:
            return
        try:
            on_host.compute_piece(self._host)
        except Exception as error:
            on_host.error, on_host.done = error, True
        if on_host.done:
            self._on_done()
        elif on_host.wanted:
            self._thread.submit(self._compute, on_host)

    def __contains__(self, session: object) -> bool:
        return session in self._of

    def has(self, session: object) -> bool:
        """True if done or failed."""
        if session not in self._of:
            return False
        on_host = self._of[session]
        return on_host is None or on_host.done

    def take(self, session: object) -> OnHost | None:
        """The finished result, or None."""
        on_host = self._of.pop(session, None)
        if on_host is None:
            return None
        on_host.wanted = False
        if not on_host.done:
            return None
        if on_host.error is not None:
            self._failures.add((adapter.content_hash for adapter in on_host.adapters), on_host.error)
            return None
        return on_host

    def close(self) -> None:
        """Wait for all computation."""
        for session in list(self._of):
            self.take(session)
        self._thread.shutdown()
