"""The share of requests that start at once, by either model of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .corrected import corrected_admissibility_rate
from .iar import immediate_admissibility_rate, min_capacity

Admitted = Callable[[NDArray[np.float64], float, int], float]

ADMITTED: dict[str, Admitted] = {
    "paper": immediate_admissibility_rate,
    "corrected": corrected_admissibility_rate,
}


def smallest_capacity_of(
    estimator: str, probabilities: NDArray[np.float64], global_batch: float, target: float
) -> int:
    """The smallest capacity whose IAR reaches the target, by that estimator.

    "paper": algorithm 1.  "corrected": its IAR grows with the capacity, so in steps that double, from the
    paper's answer on, which is mostly near, and then by bisection.
    """
    near = min_capacity(probabilities, global_batch, target)
    if estimator == "paper":
        return near
    admitted, num_used = ADMITTED[estimator], int(np.count_nonzero(probabilities))
    low, high, step = 0, num_used, 1
    if admitted(probabilities, global_batch, near) >= target:
        high = near
        while high - step > 0 and admitted(probabilities, global_batch, high - step) >= target:
            high, step = high - step, 2 * step
        low = max(0, high - step)
    else:
        low = near
        while low + step < num_used and admitted(probabilities, global_batch, low + step) < target:
            low, step = low + step, 2 * step
        high = min(num_used, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        if admitted(probabilities, global_batch, middle) >= target:
            high = middle
        else:
            low = middle
    return high


def rates_at(probabilities: NDArray[np.float64], global_batch: float, capacity: int) -> dict[str, float]:
    """IAR by each estimator."""
    return {name: admitted(probabilities, global_batch, capacity) for name, admitted in ADMITTED.items()}
