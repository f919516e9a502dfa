# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations


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
