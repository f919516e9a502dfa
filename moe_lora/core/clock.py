# SPDX-License-Identifier: Apache-2.0
"""Time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since an arbitrary start, never decreasing."""
        ...


class WallClock:
    now_s = staticmethod(time.monotonic)
