"""Tokens per second of each adapter in the time step to come, from those of the steps before.

`provision.demand` counts requests over a sliding window for the cache's model; a placement is made once per
time step, from tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

NUM_STEPS = 4


class DemandHistory:
    """The last num_steps time steps, and the line through them.

    The forecast is the least-squares line at the next step, not below 0 and not above twice the most seen;
    adapters whose demand did not change are forecast to have exactly it.  Adapters without any in all
    these steps are forgotten.  Source: LoRAServe, Algorithm 1, lines 3-6, which leaves "extrapolate" open.
    """

    def __init__(self, num_steps: int = NUM_STEPS) -> None:
        if num_steps < 1:
            raise ValueError(
                f"num_steps={num_steps} must be 1 or more; 1 is the last step's demand as it was"
            )
        self._steps: deque[dict[str, float]] = deque(maxlen=num_steps)

    def observe(self, tokens: Mapping[str, float], length_s: float) -> None:
        """The time step that has just ended.  Raises ValueError for a length of 0 or less."""
        if not length_s > 0:
            raise ValueError(f"length_s={length_s} must be positive")
        self._steps.append({adapter: number / length_s for adapter, number in tokens.items()})

    def forecast(self) -> dict[str, float]:
        """Adapter -> tokens/s, of those that had any; empty before the first step."""
        if not self._steps:
            return {}
        weights = _line_weights(len(self._steps))
        last = self._steps[-1]
        found = {}
        for adapter in set().union(*self._steps):
            rates = [step.get(adapter, 0.0) for step in self._steps]
            here = last.get(adapter, 0.0)
            # Weights sum to 1, so this is sum(weight · rate), without rounding where all rates are equal.
            line = here + sum(weight * (rate - here) for weight, rate in zip(weights, rates, strict=True))
            found[adapter] = min(max(0.0, line), 2.0 * max(rates))
        return found


def _line_weights(num: int) -> list[float]:
    """Of the value at `num` of the least-squares line through values at 0, ..., num - 1."""
    mean = (num - 1) / 2
    spread = sum((place - mean) ** 2 for place in range(num)) or 1.0
    return [1 / num + (num - mean) * (place - mean) / spread for place in range(num)]
