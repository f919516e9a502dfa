# SPDX-License-Identifier: Apache-2.0
"""A host worker of a device's stream, with guaranteed answers.

A stream's wait has no time limit: the link's thread answers for a dead, late or refusing worker.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.dist.deltas.frame_slots import FIRST_SLEEP_S, FrameSlots
from moe_lora.dist.deltas.session import DONE, DeltaRequest, FrameLayout
from moe_lora.dist.deltas.stream_backend import Stream, StreamSession
from moe_lora.dist.transport.shm import ShmTransport

from .worker import StoreDeltas
from .worker_link import DEPTH, START_TIMEOUT_S, WorkerLink

logger = logging.getLogger(__name__)

_LOOK_S, _SERVING_LOOK_S = 0.02, 10 * FIRST_SLEEP_S


class StreamWorkerLink(WorkerLink):
    """Keeps one worker process and its slots for a stream; the slots outlive processes.

    serving: the worker serves, not this thread.  num_fallback_rows, problems: see
    `stream_backend.StreamLink`.
    """

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
        """By slot, the owed use and its start time."""
        self._ended = threading.Event()
        self.serving = threading.Event()
        self.num_fallback_rows = 0
        self.problems: dict[int, Exception] = {}
        self.stream_session = StreamSession(self._slots, stream)
        self._deltas = StoreDeltas(layout.shape, store)
        super().__init__(number, transport, layout, store, *options)

    def end(self) -> None:
        """The stream has ended: no answers are owed."""
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
        return not self._is_late() and (self._serve(self._slots.refused) or not self._closing.wait(_LOOK_S))

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
        """As `_compute`, adapter by adapter; zeros for all without memory."""
        try:
            self.problems |= self._deltas.fill_apart(request, out)
        except Exception:
            out.zero_()
            for number in request.generation:
                self.problems[int(number)] = error
