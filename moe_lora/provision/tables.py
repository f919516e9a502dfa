"""A measured stage: seconds at some batch sizes, and a line between and beyond them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from moe_lora.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Table:
    """seconds(b), piecewise linear through (batches[i], times_s[i]).

    Beyond the last point the last line goes on.  Below the first one it is the first line, or the line
    through the origin where that is higher, so that a steep table never gives a negative time.  Raises
    ConfigError for batches that do not increase from 1 or more, and for times that are not positive or
    decrease.
    """

    batches: tuple[float, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.batches) < 2 or len(self.batches) != len(self.times_s):
            raise ConfigError(
                f"{len(self.times_s)} times for {len(self.batches)} batches; give one a batch, two at least"
            )
        steps = zip(self.batches, self.batches[1:], strict=False)
        if self.batches[0] < 1 or any(not low < high for low, high in steps):
            raise ConfigError(f"batches={list(self.batches)} must increase from 1 or more")
        if not all(0 < time < math.inf for time in self.times_s):
            raise ConfigError(f"times {list(self.times_s)} must be finite and positive")
        if any(low > high for low, high in zip(self.times_s, self.times_s[1:], strict=False)):
            raise ConfigError(
                f"times {list(self.times_s)} must not fall while the batch grows; measure again"
            )

    def seconds(self, batch: float) -> float:
        """Time at this batch; 0 for an empty one."""
        if batch <= 0:
            return 0.0
        place = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        (low, high), (low_s, high_s) = (
            self.batches[place - 1 : place + 1],
            self.times_s[place - 1 : place + 1],
        )
        time_s = low_s + (high_s - low_s) * (batch - low) / (high - low)
        if batch < self.batches[0]:
            time_s = max(time_s, self.times_s[0] * batch / self.batches[0])
        return time_s
