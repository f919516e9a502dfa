# SPDX-License-Identifier: Apache-2.0
"""A device's stream without a device: a thread that does one queued operation after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import torch

from tests.patience import PATIENCE_S


class QueuedStream:
    """A `Stream`.  registered: memory that the device may use.  waiting: an answer is being waited for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.waiting = threading.Event()
        self._goes = threading.Event()
        self._goes.set()
        self._operations: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._captured: list[Callable[[], object]] | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def hold(self) -> None:
        """Begin no operation until `go_on`."""
        self._goes.clear()

    def go_on(self) -> None:
        self._goes.set()

    def capture(self, calls: Callable[[], object]) -> Callable[[], None]:
        """What `calls` queues is not done, but each time that what is returned is called."""
        self._captured = graph = []
        calls()
        self._captured = None

        def replay() -> None:
            for operation in graph:
                self.queue(operation)

        return replay

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def queue(self, operation: Callable[[], object]) -> None:
        if self._captured is not None:
            self._captured.append(operation)
        else:
            self._operations.put(operation)

    def ask(
        self, header: torch.Tensor, facts: Sequence[int], word: torch.Tensor, counter: torch.Tensor
    ) -> None:
        def ask() -> None:
            header[:5] = torch.tensor(facts)
            counter.add_(1)
            word.copy_(counter)

        self.queue(ask)

    def wait(self, word: torch.Tensor, counter: torch.Tensor) -> None:
        def wait() -> None:
            while int(word) < int(counter):
                self.waiting.set()
                time.sleep(1e-4)
            self.waiting.clear()

        self.queue(wait)

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        place = memory.data_ptr()
        self.registered.add(place)
        return lambda: self.registered.discard(place)

    def synchronize(self) -> None:
        done = threading.Event()
        self._operations.put(done.set)
        assert done.wait(PATIENCE_S), "the stream hangs"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            operation = self._operations.get()
            self._goes.wait()
            try:
                operation()
            except BaseException as error:
                self._error = error


class InlineStream(QueuedStream):
    """Each operation is done when it is queued, by who queues it: the protocol in an engine on a CPU."""

    def queue(self, operation: Callable[[], object]) -> None:
        operation()
