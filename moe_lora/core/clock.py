# SPDX-License-Identifier: Apache-2.0
"""Time as an argument: wall clock for engines, virtual clock for simulation and tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since an arbitrary start, never decreasing."""
        ...


class WallClock:
    now_s = staticmethod(time.monotonic)


class VirtualClock:
    """Time advances only by calls."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds={seconds} would turn the clock back")
        self._now_s += seconds
