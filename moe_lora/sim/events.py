# SPDX-License-Identifier: Apache-2.0
"""The event queue and virtual clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class EventQueue:
    """Calls by time, ties in order of insertion.  A `core.clock.Clock`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0
        self._stopped = False
        self.num_events = 0

    def now_s(self) -> float:
        return self._now_s

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Schedule a call.  Raises ValueError for a past or invalid time."""
        if not self._now_s <= time_s < math.inf:
            raise ValueError(f"time_s={time_s} is not from now ({self._now_s}) on")
        self._num_asked += 1
        heapq.heappush(self._heap, (time_s, self._num_asked, call))

    def stop(self) -> None:
        self._stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Run all events up to until_s."""
        while self._heap and not self._stopped and self._heap[0][0] <= until_s:
            self._now_s, _, call = heapq.heappop(self._heap)
            self.num_events += 1
            call()
