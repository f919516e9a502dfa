# SPDX-License-Identifier: Apache-2.0
"""A process on its own core that computes deltas from host memory.

Serves a `dist.deltas.session` or `frame_slots`, and ends with the engine.  Source: Toppings section 4.2.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.core.teardown import end_at_hang_up, run_child
from moe_lora.dist.deltas.frame_slots import Compute, FrameSlots
from moe_lora.dist.deltas.host_deltas import FailureLog, HostDeltas
from moe_lora.dist.deltas.session import DONE, STALE, DeltaRequest, FrameLayout, PeerFrames
from moe_lora.dist.lora_server.data_loop import ServerSession
from moe_lora.dist.transport.shm import ShmTransport
from moe_lora.lora.row_routing import RoutedAdapter, content_prefix

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSetUp:
    """A worker's first message.

    answers, requests: descriptors of the engine's windows; requests None: a `ServerSession` serves.  core
    None: any.  owned: the store goes with the engine.
    """

    name: str
    layout: FrameLayout
    depth: int
    store_dir: Path
    answers: bytes
    core: int | None
    owned: bool
    engine_pid: int
    slowdown: float
    requests: bytes | None


class StoreDeltas:
    """Answers from a store's adapters, named by `content_number`."""

    def __init__(self, shape: ModelShape, store: HostStore, shard: ModelShard | None = None) -> None:
        self._store = store
        self._deltas = HostDeltas(shape, store, shard)
        self._hashes: dict[int, str] = {}
        self._failures = FailureLog(logger, "the engine computes its rows")

    def compute(self, request: DeltaRequest, out: torch.Tensor) -> int:
        """As `fill`; returns the state, STALE after an error."""
        try:
            self.fill(request, out)
        except Exception as error:
            self._failures.add(map(content_prefix, np.unique(request.generation).tolist()), error)
            return STALE
        return DONE

    def fill(self, request: DeltaRequest, out: torch.Tensor) -> None:
        """out [R, N] = the request's deltas.  Raises AdapterError for a missing adapter."""
        numbers, row_adapter = np.unique(request.generation, return_inverse=True)
        adapters = [RoutedAdapter(self._hash_of(number), ()) for number in numbers.tolist()]
        self._deltas.compute(request, adapters, row_adapter, out)

    def fill_apart(self, request: DeltaRequest, out: torch.Tensor) -> dict[int, Exception]:
        """As `fill`, with zeros for failed adapters; returns their errors."""
        numbers, row_adapter = np.unique(request.generation, return_inverse=True)
        failed: dict[int, Exception] = {}
        total = torch.zeros_like(out)
        for index, number in enumerate(numbers.tolist()):
            try:
                adapter = RoutedAdapter(self._hash_of(number), ())
                self._deltas.compute(request, [adapter], np.where(row_adapter == index, 0, -1), out)
            except Exception as error:
                failed[number] = error
            else:
                total += out
        out.copy_(total)
        return failed

    def _hash_of(self, number: int) -> str:
        known = self._hashes.get(number)
        if known is None:
            known = self._hashes[number] = self._store.find(content_prefix(number))
        return known


def serve(connection: Connection) -> None:
    """Answer until the engine hangs up."""
    setup: WorkerSetUp = connection.recv()
    if setup.core is not None:
        os.sched_setaffinity(0, {setup.core})
    torch.set_num_threads(1)
    layout = setup.layout
    transport = ShmTransport(name=setup.name)
    answers = transport.attach(setup.answers)
    deltas = StoreDeltas(layout.shape, HostStore(setup.store_dir), layout.shard)

    def compute(request: DeltaRequest, out: torch.Tensor) -> int:
        started_ns = time.monotonic_ns()
        state = deltas.compute(request, out)
        slow_down(started_ns, setup.slowdown)
        return state

    serve_next: Callable[[Compute], None]
    if setup.requests is not None:
        serve_next = FrameSlots(transport.attach(setup.requests), answers, layout, setup.depth).serve_next
        connection.send(None)
    else:
        requests = transport.alloc("requests", setup.depth * layout.request_bytes, 1)
        frames = PeerFrames(transport, answers, layout.answer_bytes, setup.depth)
        session = ServerSession(setup.name, setup.name, requests, frames, layout, setup.depth)
        serve_next = partial(_serve_next, transport, session)
        connection.send(requests.descriptor())
    end_at_hang_up(connection.fileno(), partial(_remove_store, setup))
    connection.recv()
    while True:
        serve_next(compute)


def _serve_next(transport: ShmTransport, session: ServerSession, compute: Compute) -> None:
    transport.signal_wait_until(session.requests, 0, session.handled + 1, None)
    started_ns = time.monotonic_ns()
    request = session.pending()
    assert request is not None
    session.answer(request, compute(request, session.deltas(request)), started_ns)


def slow_down(started_ns: int, factor: float) -> None:
    """Return after `factor` times the time since started_ns; a sleep would be late."""
    due_ns = started_ns + factor * (time.monotonic_ns() - started_ns)
    while time.monotonic_ns() < due_ns:
        pass


def _remove_store(setup: WorkerSetUp) -> None:
    if setup.owned and os.getppid() != setup.engine_pid:  # the engine was killed
        shutil.rmtree(setup.store_dir, ignore_errors=True)


if __name__ == "__main__":
    run_child(lambda fd: serve(Connection(fd)))
