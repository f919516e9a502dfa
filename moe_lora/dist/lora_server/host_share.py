# SPDX-License-Identifier: Apache-2.0
"""Host computation for a server rank: rows of adapters with a layer still loading.

Legend: T token rows, R rows of the answer, N output width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from moe_lora.core.shape import ModelShape
from moe_lora.dist.deltas.host_deltas import FailureLog
from moe_lora.dist.deltas.session import DeltaRequest
from moe_lora.lora.row_routing import RoutedAdapter

logger = logging.getLogger(__name__)


class HostCompute(Protocol):
    """Computes deltas on the host's cores.  num_tokens: tokens per piece, in time."""

    num_tokens: int

    def compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        out: torch.Tensor,
    ) -> None:
        """As `HostDeltas.compute`."""
        ...

    def close(self) -> None:
        """Stop; no further calls."""
        ...


class OnHost:
    """Rows of a request in computation on the host, piece by piece.

    tokens: [T] bool.  rows: of the answer.  deltas: [number of rows, N].  done: all computed, or failed
    (error).  wanted: a session waits for the rows.
    """

    def __init__(
        self, request: DeltaRequest, tokens: np.ndarray, adapters: Sequence[RoutedAdapter], width: int
    ) -> None:
        """tokens: [T], the adapter of each token's rows, -1: not for the host."""
        self.tokens = tokens >= 0
        token_of = np.arange(len(tokens)) if request.ids is None else np.nonzero(request.ids >= 0)[0]
        self.rows = torch.from_numpy(np.flatnonzero(self.tokens[token_of]))
        self.deltas = torch.empty(len(self.rows), width, dtype=request.x.dtype)
        self.done, self.wanted = False, True
        self.error: Exception | None = None
        self.adapters = adapters
        self._row_adapter = tokens[self.tokens]
        # Copies: the session's memory may go meanwhile.
        self._request = _some(request, np.flatnonzero(self.tokens))
        self._next_token = self._next_row = 0

    def compute_piece(self, host: HostCompute) -> None:
        """Compute the next rows, num_tokens tokens."""
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

    Sessions take turns of one piece, so a request waits for at most one piece of each session between two of
    its own.  Unwanted requests, whose layer has arrived, end after the current piece.
    on_done: called from that thread for a finished request.
    """

    def __init__(self, shape: ModelShape, host: HostCompute, on_done: Callable[[], None]) -> None:
        self._shape = shape
        self._host = host
        self._on_done = on_done
        self._thread = ThreadPoolExecutor(1, "host-share")
        self._of: dict[object, OnHost | None] = {}
        """None: the host can't compute the session's request."""
        self._failures = FailureLog(logger, "the host can't compute its rows, so instances do")

    def begin(
        self,
        session: object,
        request: DeltaRequest,
        here: np.ndarray,
        contents: Mapping[int, tuple[int, RoutedAdapter]],
    ) -> None:
        """Compute the rows that are not `here` ([T] bool), unless their adapters are still unknown.

        contents: generation and adapter of each slot.
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
        """True for a request that is done or failed."""
        if session not in self._of:
            return False
        on_host = self._of[session]
        return on_host is None or on_host.done

    def take(self, session: object) -> OnHost | None:
        """The finished result of the session's request, or None."""
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
        """Returns after the end of all computation."""
        for session in list(self._of):
            self.take(session)
        self._thread.shutdown()
