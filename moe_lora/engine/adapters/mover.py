"""Copies beside the steps: one thread that carries out orders in turn, on a stream of its own on CUDA."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class Mover(threading.Thread):
    """Carries out what is submitted, first come first served, while the engine's thread computes.

    device: that of the arena.  on_done: called from this thread after each copy.  bytes_per_s: upper bound on
    the rate; None = none.
    """

    def __init__(
        self, device: torch.device, on_done: Callable[[], None], bytes_per_s: float | None = None
    ) -> None:
        super().__init__(name="mover", daemon=True)
        self._on_done = on_done
        self._bytes_per_s = bytes_per_s
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self.start()

    def submit(self, number: int, num_bytes: int, copy: Callable[[], None]) -> None:
        """Have `copy` called; `finished` tells when what it copied is there.

        On CUDA it comes after everything that the calling thread has launched so far: pages that a step reads
        or writes are not touched before that step is over.
        """
        launched = None
        if self._stream is not None:
            launched = torch.cuda.Event()
            launched.record()
        self._orders.put((number, num_bytes, copy, launched))

    def finished(self) -> list[tuple[int, Exception | None]]:
        """Numbers of the copies that ended since the last call, each with what kept it from its work."""
        ended = []
        while not self._done.empty():
            ended.append(self._done.get())
        return ended

    def close(self) -> None:
        """End after the copy under way; may be called again."""
        self._closing.set()
        self._orders.put(None)
        if self is not threading.current_thread():
            self.join(CLOSE_TIMEOUT_S)

    def run(self) -> None:
        while self._take_one():
            continue

    def _take_one(self) -> bool:
        """Wait for an order and carry it out; False at the end.

        A method of its own, so that nothing holds what was copied, an adapter's memory, while it waits.
        """
        order = self._orders.get()
        if order is None or self._closing.is_set():
            return False
        number, num_bytes, copy, launched = order
        error: Exception | None = None
        try:
            self._carry_out(num_bytes, copy, launched)
        except Exception as problem:
            logger.exception("a copy of %d bytes failed", num_bytes)
            error = problem
        self._done.put((number, error))
        self._on_done()
        return True

    def _carry_out(self, num_bytes: int, copy: Callable[[], None], launched: torch.cuda.Event | None) -> None:
        start_s = time.monotonic()
        with self._on_stream():
            if self._stream is not None and launched is not None:
                self._stream.wait_event(launched)
            copy()
            if self._stream is not None:
                self._stream.synchronize()
        if self._bytes_per_s is not None:
            self._closing.wait(max(0.0, num_bytes / self._bytes_per_s - (time.monotonic() - start_s)))

    def _on_stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


_Order = tuple[int, int, Callable[[], None], "torch.cuda.Event | None"]
