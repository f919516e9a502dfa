# SPDX-License-Identifier: Apache-2.0
"""The engine's link to one host worker: its process, with restarts, and the session."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import EngineDeadError, PeerUnreachableError
from moe_lora.core.processes import STOP_TIMEOUT_S, Child, RestartPolicy, start_child
from moe_lora.dist.deltas.session import ClientSession, FrameLayout
from moe_lora.dist.transport.contract import Transport

from .worker import WorkerSetUp

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
DEPTH = 4
"""Frames of a session: sites of a layer in flight, and one to spare."""
_RESTARTS = RestartPolicy()
_LOOK_S, _GRACE_S = 0.05, 0.5


@dataclass(frozen=True)
class WorkerTimes:
    """answer_timeout_s: limit, after which the engine computes a worker's rows.  slowdown: emulates less than
    a core.
    """

    answer_timeout_s: float = 5.0
    slowdown: float = 1.0


class WorkerLink(threading.Thread):
    """Keeps one worker process and a `ClientSession`.

    session: None while disconnected; the engine then computes deltas.
    """

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
        """Raises EngineDeadError if the worker does not start in time."""
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
                except Exception:  # without this thread no worker restarts, and a stream waits for ever
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
        layout = self._layout
        label, answers, requests = self._windows(held)
        facts = (label, layout.shape, layout.dtype, layout.max_rows, DEPTH, self._store.directory)
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
        """A name for the worker, and descriptors of windows for answers and requests."""
        label = f"{self.name}-{next(self._starts)}"
        self._answers = self._transport.alloc(label, DEPTH * self._layout.answer_bytes, 1)
        held.callback(self._answers.free)
        return label, self._answers.descriptor(), None

    def _hears(self, connection: Connection) -> bool:
        return connection.poll(START_TIMEOUT_S)

    def _open(self, requests: bytes, held: contextlib.ExitStack) -> None:
        """The worker is ready; requests: descriptor of its window."""
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
