"""What an engine loop is told, and when: a command may lie here for as long as a step takes."""

from __future__ import annotations

import queue
from collections.abc import Callable

from moe_lora.core.clock import Clock, WallClock

from .messages import Command

Entry = Command | Callable[[], None]


class Inbox:
    """A queue of commands, and of calls to be made by the loop's thread.

    clock: of the engine; stamps entries as they are put, in the thread that brings them.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or WallClock()
        self._entries: queue.SimpleQueue[tuple[Entry, float]] = queue.SimpleQueue()

    def put(self, entry: Entry) -> None:
        self._entries.put((entry, self.clock.now_s()))

    def get(self, timeout_s: float | None = None) -> tuple[Entry, float]:
        """The next entry and when it came, in seconds.  Raises queue.Empty if none comes in time."""
        return self._entries.get(timeout=timeout_s)

    def empty(self) -> bool:
        return self._entries.empty()
