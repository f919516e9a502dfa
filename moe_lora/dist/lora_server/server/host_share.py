"""What a server rank has the host's cores compute: rows of adapters whose layer is still being loaded.

Legend: T token rows, R rows of the answer, N output width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.protocol.session import DeltaRequest
from moe_lora.lora.row_routing import RoutedAdapter

logger = logging.getLogger(__name__)


class HostCompute(Protocol):
    """Computes deltas on the host's cores."""

    def compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        out: torch.Tensor,
    ) -> None:
        """As `HostDeltas.compute`; a row whose adapter is -1 becomes zero."""
        ...

    def close(self) -> None:
        """No more are asked for."""
        ...


@dataclass(frozen=True)
class OnHost:
    """Rows of a request that the host computes.  tokens: [T] bool.  rows: those of the answer."""

    tokens: np.ndarray
    rows: torch.Tensor
    computed: Future[torch.Tensor]

    def deltas(self) -> torch.Tensor:
        """[number of rows, N]."""
        return self.computed.result()[self.rows]


class HostShare:
    """At most one request of each session, computed in a thread of its own; used by the data loop's.

    on_done: called, from that thread, when one is.
    """

    def __init__(self, shape: ModelShape, host: HostCompute, on_done: Callable[[], None]) -> None:
        self._shape = shape
        self._host = host
        self._on_done = on_done
        self._thread = ThreadPoolExecutor(1, "host-share")
        self._of: dict[object, OnHost] = {}

    def begin(
        self,
        session: object,
        request: DeltaRequest,
        here: np.ndarray,
        contents: Mapping[int, tuple[int, RoutedAdapter]],
    ) -> None:
        """Have the rows computed that are not `here` ([T] bool), unless their adapters are not known yet.

        contents: generation and adapter of each slot.
        """
        row_adapter = np.full(len(here), -1)
        adapters: list[RoutedAdapter] = []
        for slot in set(request.slot[~here].tolist()):
            generation, adapter = contents.get(slot, (-1, None))
            of_slot = ~here & (request.slot == slot)
            if adapter is None or (request.generation[of_slot] != generation).any():
                return  # its load command is on its way
            row_adapter[of_slot] = len(adapters)
            adapters.append(adapter)
        # From copies: the session's memory may go meanwhile.
        slot, generation = request.slot.copy(), request.generation.copy()
        ids = None if request.ids is None else request.ids.copy()
        copied = replace(request, slot=slot, generation=generation, ids=ids, x=request.x.clone())
        computed = self._thread.submit(self._compute, copied, adapters, row_adapter)
        computed.add_done_callback(lambda _: self._on_done())
        token_of = np.arange(len(row_adapter)) if ids is None else np.nonzero(ids >= 0)[0]
        rows = torch.from_numpy(np.flatnonzero(row_adapter[token_of] >= 0))
        self._of[session] = OnHost(row_adapter >= 0, rows, computed)

    def _compute(
        self, request: DeltaRequest, adapters: Sequence[RoutedAdapter], row_adapter: np.ndarray
    ) -> torch.Tensor:
        width = self._shape.sites[request.site].total_out_features
        deltas = torch.empty(request.num_rows, width, dtype=request.x.dtype)
        self._host.compute(request, adapters, row_adapter, deltas)
        return deltas

    def __contains__(self, session: object) -> bool:
        """Whether a request of it was begun and not taken."""
        return session in self._of

    def has(self, session: object) -> bool:
        """Whether one was, and is done."""
        return session in self._of and self._of[session].computed.done()

    def take(self, session: object) -> OnHost | None:
        """What was computed for the session's request; None if nothing was, or could be, or is yet."""
        on_host = self._of.pop(session, None)
        if on_host is None or not on_host.computed.done():
            return None
        error = on_host.computed.exception()
        if error is not None:
            logger.warning("the host can't compute a request, so its instance does: %s", error)
            return None
        return on_host

    def close(self) -> None:
        """Return when nothing is computed any more."""
        self._thread.shutdown()
