"""Equal steps taken together."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Stretch:
    """num_steps steps from start_s on: the first takes first_s, each other one step_s.

    Of no steps: the moment before a step, so that all that happens at start_s comes before it.
    """

    start_s: float
    first_s: float = 0.0
    step_s: float = 0.0
    num_steps: int = 0

    @property
    def end_s(self) -> float:
        if self.num_steps == 0:
            return self.start_s
        return self.start_s + self.first_s + (self.num_steps - 1) * self.step_s

    def steps_done(self, now_s: float) -> int:
        """Steps that have ended by now_s."""
        over_s = now_s - self.start_s - self.first_s
        if over_s < 0:
            return 0
        if self.step_s == 0:
            return self.num_steps
        return min(self.num_steps, 1 + math.floor(over_s / self.step_s))

    def cut(self, now_s: float) -> bool:
        """End with the step under way; False if it does so anyway."""
        if self.num_steps < 2 or self.step_s == 0:
            return False
        over_s = now_s - self.start_s - self.first_s
        begun = 1 + max(0, math.ceil(over_s / self.step_s))
        if self.start_s + self.first_s + (begun - 1) * self.step_s < now_s:  # by rounding
            begun += 1
        if begun >= self.num_steps:
            return False
        self.num_steps = begun
        return True
