# SPDX-License-Identifier: Apache-2.0
"""An engine's host workers, and the division of rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import OwnFolder
from moe_lora.core.processes import STOP_TIMEOUT_S, allowed_core_numbers, usable_cores
from moe_lora.dist.deltas.host_deltas import compute_chosen
from moe_lora.dist.deltas.remote_backend import DividedBackend, RemoteBackend, Shares
from moe_lora.dist.deltas.session import DeltaRequest, FrameLayout
from moe_lora.dist.deltas.stream_backend import Stream, StreamBackend
from moe_lora.dist.transport.shm import ShmTransport
from moe_lora.kernels.operands import StepTables
from moe_lora.lora.row_routing import RoutedAdapter, RowRouting, Source, content_number, no_terms

from .worker_link import StreamWorkerLink, WorkerLink
from .worker_link import WorkerTimes as WorkerTimes

_NOTHING = torch.empty(0, dtype=torch.int32)
_USUAL_TIMES = WorkerTimes()
_NO_STEP = StepTables(query_start=_NOTHING, seq_lens=_NOTHING, block_tables=_NOTHING)


def check_cores(
    num_workers: int, num_ranks: int, cores: Sequence[int], *, setting: str = "host_workers"
) -> None:
    """Raises ConfigError for more workers than cores, and for unavailable cores.

    num_ranks: on this host.
    """
    allowed = allowed_core_numbers()
    unknown = [core for core in cores if core not in allowed]
    if unknown:
        raise ConfigError(
            f"host_cores={tuple(cores)}: this process may not use core {unknown[0]}; choose from "
            f"{', '.join(map(str, allowed))}, or give it more cores (cpuset)"
        )
    usable = usable_cores()
    if num_workers * num_ranks > usable and not cores:
        raise ConfigError(
            f"{setting}={num_workers} for each of {num_ranks} ranks is more than the {usable} cores "
            f"that this process may use; choose at most {usable // num_ranks}"
        )


class HostWorkers:
    """The host workers of one engine process, and their LoraBackend.

    store None: a new store in the engine's folder.  num_tokens: per step in time, over all workers.  cores:
    one per worker.  stream None: the engine's thread waits.  Raises EngineDeadError if a worker does not
    start, ConfigError if the device can't use the frames.
    """

    def __init__(
        self,
        layout: FrameLayout,
        store: HostStore | None,
        num_workers: int,
        tokens_per_worker: int,
        *,
        cores: Sequence[int] = (),
        times: WorkerTimes = _USUAL_TIMES,
        stream: Stream | None = None,
    ) -> None:
        shape = layout.shape
        self._groups = ((0,) * len(shape.sites),) * shape.num_layers
        self._folder = None if store is not None else _own_folder()
        self.store = store = store or HostStore(self._folder.path if self._folder else "")
        self.num_tokens = num_workers * tokens_per_worker
        self._stream = stream
        self._transport = transport = ShmTransport(name=f"host-workers-{os.getpid()}")
        options = times, self._folder is not None
        places = {
            number: (number, transport, layout, store, cores[number] if cores else None, *options)
            for number in range(num_workers)
        }
        shares = RowShares(num_workers, tokens_per_worker, shape.num_experts)
        self.links: dict[int, WorkerLink] = {}
        self.backend: DividedBackend
        try:
            if stream is None:
                links = self.links = {number: WorkerLink(*place) for number, place in places.items()}
                self.backend = RemoteBackend(shape, Source.HOST, shares, links, layout, store)
            else:
                owed = {}
                for number, place in places.items():
                    self.links[number] = owed[number] = StreamWorkerLink(stream, *place)
                self.backend = StreamBackend(shape, shares, owed, stream)
            for link in self.links.values():
                link.wait_ready()
        except BaseException:
            self.close()
            raise

    def compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        out: torch.Tensor,
    ) -> None:
        """As `HostDeltas.compute`, divided over the workers."""
        terms = no_terms(len(adapters), 1)
        for number, adapter in enumerate(adapters):
            terms[number, 0, 0] = (Source.HOST, number, number, content_number(adapter.content_hash))
        rows = RowRouting(groups=self._groups, row_route=row_adapter, terms=terms, adapters=adapters)
        self.backend.begin_step(_NO_STEP, rows)
        try:
            compute_chosen(request.ids, partial(self._compute, request), out)
        except BaseException:
            self.backend.abandon_step()
            raise

    def _compute(self, request: DeltaRequest, deltas: torch.Tensor) -> None:
        ids = None if request.ids is None else torch.from_numpy(request.ids)
        add_to = self.backend.begin(request.layer, request.site, request.x, ids)
        deltas.zero_()
        if add_to is not None:
            add_to(deltas)

    @property
    def pids(self) -> list[int | None]:
        """Process ids, None during a start."""
        return [link.pid for link in self.links.values()]

    def failures(self) -> dict[int, Exception]:
        """Errors by `content_number` since the last call; their step's rows are wrong.

        Call after the device's step.  Without a stream the step raises instead.
        """
        return self.backend.failures()

    def settle(self) -> None:
        """Wait until no request is under way."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """End all workers; idempotent."""
        for link in self.links.values():
            link.close()
        try:
            self.settle()
        finally:
            for link in self.links.values():
                link.end()
            for link in self.links.values():
                link.join(STOP_TIMEOUT_S)
            self._transport.close()
            if self._folder is not None:
                self._folder.remove()


def _own_folder() -> OwnFolder:
    try:
        return OwnFolder()
    except OSError as error:
        raise ConfigError(
            f"host workers read adapters from a folder in TMPDIR={tempfile.gettempdir()!r}, where none can "
            f"be made ({error.strerror}); let TMPDIR name another place, or set host_workers=0"
        ) from error


class RowShares:
    """Divides a site's rows over the workers, in pieces of at most c = tokens_per_worker rows.

    In turn: L rows occupy ⌈L / c⌉ workers.  Source: Toppings section 4.2.
    """

    def __init__(self, num_workers: int, tokens_per_worker: int, num_experts: int) -> None:
        self._num_workers = num_workers
        self._tokens_per_worker = tokens_per_worker
        self._experts = range(num_experts)

    def shares(self, layer: int, site: int, tokens: np.ndarray, slot: np.ndarray) -> Shares:
        """(worker, token rows), workers with rows only."""
        num_pieces = -(-len(tokens) // self._tokens_per_worker)
        pieces = np.array_split(tokens, num_pieces)
        return [(number % self._num_workers, piece) for number, piece in enumerate(pieces)]

    def experts_of(self, server: int) -> range:
        """Every worker has all experts."""
        return self._experts
