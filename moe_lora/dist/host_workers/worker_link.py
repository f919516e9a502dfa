# SPDX-License-Identifier: Apache-2.0
"""The engine's links to host workers: a process with restarts, and the session.

A stream's wait has no limit: the link's thread answers for a failed worker.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import EngineDeadError, PeerUnreachableError
from moe_lora.core.processes import STOP_TIMEOUT_S, Child, RestartPolicy, start_child
from moe_lora.dist.deltas.frame_slots import FIRST_SLEEP_S, FrameSlots
from moe_lora.dist.deltas.session import DONE, ClientSession, DeltaRequest, FrameLayout
from moe_lora.dist.deltas.stream_backend import Stream, StreamSession
from moe_lora.dist.transport.contract import Transport
from moe_lora.dist.transport.shm import ShmTransport

from .worker import StoreDeltas, WorkerSetUp

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
DEPTH = 4
"""Frames of a session: a layer's sites, and one to spare."""
_RESTARTS = RestartPolicy()
_LOOK_S, _GRACE_S = 0.05, 0.5


@dataclass(frozen=True)
class WorkerTimes:
    """answer_timeout_s: then the engine computes.  slowdown: emulates less than a core."""

    answer_timeout_s: float = 5.0
    slowdown: float = 1.0


class WorkerLink(threading.Thread):
    """Keeps one worker process and a session, or None: the engine computes."""

    session: ClientSession | None = None
    _end_s = 1.0

    def __init__(
        self,
        number: int,
        transport: Transport,
        layout: FrameLayout,
        store: HostStore,
        core: int | None,
        times: WorkerTimes,
        owned: bool,
    ) -> None:
        super().__init__(name=f"host-worker-{number}", daemon=True)
        self._transport = transport
        self._layout = layout
        self._store = store
        self._core = core
        self._owned = owned
        self._times = times
        self._starts = itertools.count()
        self._closing = threading.Event()
        self._ready = threading.Event()
        self.pid: int | None = None
        self.start()

    def wait_ready(self) -> None:
        """Raises EngineDeadError for a late worker."""
        if not self._ready.wait(START_TIMEOUT_S):
            raise EngineDeadError(f"{self.name} did not start within {START_TIMEOUT_S:g} s; see the log")

    def close(self) -> None:
        """End the process; `join` waits for its end."""
        self._closing.set()
        session = self.session
        if session is not None:
            session.break_off()

    def end(self) -> None:
        """The stream no longer waits."""

    def run(self) -> None:
        num_deaths = 0
        while not self._pause(_RESTARTS.pause_s(num_deaths)):
            start_s = time.monotonic()
            with contextlib.ExitStack() as held:
                try:
                    self._live(held)
                except (OSError, EngineDeadError, PeerUnreachableError) as error:
                    logger.warning("%s can't be started: %s", self.name, error)
                except Exception:  # else no worker restarts, and streams wait for ever
                    logger.exception("%s can't be started", self.name)
                if not self._closing.is_set():
                    logger.warning("%s ended; the engine computes its rows until it is back", self.name)
                num_deaths = _RESTARTS.num_deaths(num_deaths, time.monotonic() - start_s)
                self._let_go()

    def _pause(self, seconds: float) -> bool:
        return self._closing.wait(seconds)

    def _let_go(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.break_off()
        self._closing.wait(_GRACE_S)

    def _live(self, held: contextlib.ExitStack) -> None:
        label, answers, requests = self._windows(held)
        facts = (label, self._layout, DEPTH, self._store.directory)
        options = self._core, self._owned, os.getpid(), self._times.slowdown
        with self._child() as (child, connection):
            connection.send(WorkerSetUp(*facts, answers, *options, requests))
            if not self._hears(connection):
                raise TimeoutError("it says nothing")
            self._open(connection.recv(), held)
            connection.send(None)
            self._ready.set()
            while not child.ended.done() and self._goes_on():
                pass

    def _windows(self, held: contextlib.ExitStack) -> tuple[str, bytes, bytes | None]:
        """Name, and window descriptors."""
        label = f"{self.name}-{next(self._starts)}"
        self._answers = self._transport.alloc(label, DEPTH * self._layout.answer_bytes, 1)
        held.callback(self._answers.free)
        return label, self._answers.descriptor(), None

    def _hears(self, connection: Connection) -> bool:
        return connection.poll(START_TIMEOUT_S)

    def _open(self, requests: bytes, held: contextlib.ExitStack) -> None:
        there = self._transport.attach(requests)
        held.callback(self._transport.detach, there)
        self.session = ClientSession(
            self._transport, there, self._answers, self._layout, DEPTH, self._times.answer_timeout_s
        )

    def _goes_on(self) -> bool:
        """False to end the worker; waits a little."""
        session = self.session
        return session is not None and not session.broken and not self._closing.wait(_LOOK_S)

    @contextlib.contextmanager
    def _child(self) -> Iterator[tuple[Child, Connection]]:
        child, connection = start_child("moe_lora.dist.host_workers.worker", num_threads=1)
        self.pid = child.pid
        try:
            with connection:
                yield child, connection
        except (EOFError, ConnectionError) as error:
            until_s = time.monotonic() + STOP_TIMEOUT_S
            while not child.ended.done() and time.monotonic() < until_s and not self._pause(_LOOK_S):
                pass
            how = child.how_ended if child.ended.done() else "hung up"
            raise EngineDeadError(f"it {how}") from error
        finally:
            self.pid = None
            child.end(self._end_s)


logger = logging.getLogger(__name__)

_ANSWER_LOOK_S, _SERVING_LOOK_S = 0.02, 10 * FIRST_SLEEP_S


class StreamWorkerLink(WorkerLink):
    """Keeps a process, and slots beyond the process's end."""

    _end_s = 0.0

    def __init__(
        self,
        stream: Stream,
        number: int,
        transport: ShmTransport,
        layout: FrameLayout,
        store: HostStore,
        *options: Any,
    ) -> None:
        self._requests = transport.alloc(f"requests-{number}", DEPTH * layout.request_bytes, DEPTH)
        self._answers = transport.alloc(f"answers-{number}", DEPTH * layout.answer_bytes, 2 * DEPTH)
        self._slots = FrameSlots(self._requests, self._answers, layout, DEPTH)
        windows = (self._requests, self._answers)
        self._registered = [
            stream.register(memory) for window in windows for memory in (window.words.memory, window.bytes)
        ]
        self._asked: list[tuple[int, float]] = []
        """By slot, the owed use and its start."""
        self._ended = threading.Event()
        self.serving = threading.Event()
        self.num_fallback_rows = 0
        self.problems: dict[int, Exception] = {}
        self.stream_session = StreamSession(self._slots, stream)
        self._deltas = StoreDeltas(layout.shape, store, layout.shard)
        super().__init__(number, transport, layout, store, *options)

    def end(self) -> None:
        """The stream has ended: nothing is owed."""
        self._ended.set()

    def run(self) -> None:
        super().run()
        self._serve_until(self._ended.is_set)
        for undo in self._registered:
            undo()

    def _pause(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        self._serve_until(lambda: self._closing.is_set() or time.monotonic() > until_s)
        return self._closing.is_set()

    def _let_go(self) -> None:
        """The slots stay."""

    def _windows(self, held: contextlib.ExitStack) -> tuple[str, bytes, bytes | None]:
        return self.name, self._answers.descriptor(), self._requests.descriptor()

    def _hears(self, connection: Connection) -> bool:
        until_s = time.monotonic() + START_TIMEOUT_S
        self._serve_until(lambda: connection.poll() or self._closing.is_set() or time.monotonic() > until_s)
        return connection.poll()

    def _open(self, requests: bytes | None, held: contextlib.ExitStack) -> None:
        self.serving.set()
        held.callback(self.serving.clear)
        self._asked = [(0, 0.0)] * DEPTH

    def _goes_on(self) -> bool:
        return not self._is_late() and (
            self._serve(self._slots.refused) or not self._closing.wait(_ANSWER_LOOK_S)
        )

    def _is_late(self) -> bool:
        now_s, asked = time.monotonic(), self._asked
        for slot, use in enumerate(self._slots.uses()):
            if asked[slot][0] != use:
                asked[slot] = (use, now_s)
        return any(use and now_s - since_s > self._times.answer_timeout_s for use, since_s in asked)

    def _serve_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            if not self._serve(self._slots.unanswered):
                time.sleep(_SERVING_LOOK_S)

    def _serve(self, owed: Callable[[], int | None]) -> bool:
        slot = owed()
        if slot is not None:
            self._slots.serve(slot, self._compute)
        return slot is not None

    def _compute(self, request: DeltaRequest, out: torch.Tensor) -> int:
        """Always answers; the engine's thread reads the problems."""
        self.num_fallback_rows += request.num_rows
        try:
            self._deltas.fill(request, out)
        except Exception as error:
            self._compute_apart(request, out, error)
        return DONE

    def _compute_apart(self, request: DeltaRequest, out: torch.Tensor, error: Exception) -> None:
        """As `_compute`, adapter by adapter; zeros without memory."""
        try:
            self.problems |= self._deltas.fill_apart(request, out)
        except Exception:
            out.zero_()
            for number in request.generation:
                self.problems[int(number)] = error
