# SPDX-License-Identifier: Apache-2.0
"""The event queue, which is also the clock: time is that of the event being carried out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class EventQueue:
    """Calls by time; those of one moment in the order in which they were asked for.  A `core.clock.Clock`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0
        self._stopped = False
        self.num_events = 0

    def now_s(self) -> float:
        return self._now_s

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call when the clock shows time_s.  Raises ValueError for a time that is past, or none."""
        if not self._now_s <= time_s < math.inf:
            raise ValueError(f"time_s={time_s} is not from now ({self._now_s}) on")
        self._num_asked += 1
        heapq.heappush(self._heap, (time_s, self._num_asked, call))

    def stop(self) -> None:
        """Carry out nothing after the event under way."""
        self._stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Carry out all events up to until_s, and those that they ask for."""
        while self._heap and not self._stopped and self._heap[0][0] <= until_s:
            self._now_s, _, call = heapq.heappop(self._heap)
            self.num_events += 1
            call()
