# SPDX-License-Identifier: Apache-2.0
"""Share of requests with an immediate start."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .corrected import corrected_admissibility_rate
from .iar import expected_active, first_from, immediate_admissibility_rate, min_capacity

Admitted = Callable[[NDArray[np.float64], float, int], float]

ADMITTED: dict[str, Admitted] = {
    "paper": immediate_admissibility_rate,
    "corrected": corrected_admissibility_rate,
}


def largest(holds: Callable[[int], bool], most: int, least: int = 1) -> int:
    """Largest n <= most with holds(n), by bisection.  Requires holds(least)."""
    return least + bisect_left(range(least + 1, most + 1), True, key=lambda n: not holds(n))


def smallest_capacity_of(
    estimator: str, probabilities: NDArray[np.float64], global_batch: float, target: float
) -> int:
    """Smallest capacity with IAR >= target; "corrected" bisects around "paper" (algorithm 1)."""
    near = min_capacity(probabilities, global_batch, target)
    if estimator == "paper":
        return near
    admitted, num_used = ADMITTED[estimator], int(np.count_nonzero(probabilities))
    return first_from(near, 1, num_used, lambda size: admitted(probabilities, global_batch, size) >= target)


def rates_at(probabilities: NDArray[np.float64], global_batch: float, capacity: int) -> dict[str, float]:
    """IAR by estimator."""
    return {name: admitted(probabilities, global_batch, capacity) for name, admitted in ADMITTED.items()}


NUM_POINTS = 25


def iar_curves(
    probabilities: NDArray[np.float64], global_batch: float, up_to: int
) -> dict[str, list[tuple[int, float]]]:
    """(capacity, IAR) points by estimator."""
    most = min(up_to, int(np.count_nonzero(probabilities)))
    capacities = sorted({round(place) for place in np.linspace(1, most, min(NUM_POINTS, most))})
    return {
        name: [(capacity, admitted(probabilities, global_batch, capacity)) for capacity in capacities]
        for name, admitted in ADMITTED.items()
    }


GRID_RATIO = 1.25


class NeededCapacity:
    """M*(LB): smallest capacity with the target IAR at LB and every smaller load; IAR is not monotone in LB.

    probabilities: [N].  adapter_share: of requests.
    """

    def __init__(
        self, estimator: str, probabilities: NDArray[np.float64], target: float, adapter_share: float = 1.0
    ) -> None:
        self._estimator, self._probabilities = estimator, probabilities
        self._target, self._share = target, adapter_share
        self._found: list[tuple[float, float, int]] = []  # load, smaller or equal load of largest need, M*

    def __call__(self, global_batch: float) -> int:
        """M* in adapters.  Skips loads with at most half the slots in use."""
        for load, peak, needed in self._found:
            if peak <= global_batch <= load:
                return needed
        peak, needed = self._up_to(global_batch)
        self._found.append((global_batch, peak, needed))
        return needed

    def _up_to(self, global_batch: float) -> tuple[float, int]:
        below = [(needed, peak) for load, peak, needed in self._found if load <= global_batch]
        needed, peak = max(below, default=(0, 0.0))
        if not needed or not self._admits(global_batch, needed):
            needed, peak = self._alone(global_batch), global_batch
        lower = GRID_RATIO ** (math.ceil(math.log(global_batch, GRID_RATIO)) - 1)
        while expected_active(self._probabilities, lower * self._share) > needed / 2:
            if not self._admits(lower, needed):
                needed, peak = self._alone(lower), lower
            lower /= GRID_RATIO
        return peak, needed

    def _admits(self, global_batch: float, capacity: int) -> bool:
        admitted = ADMITTED[self._estimator]
        return admitted(self._probabilities, global_batch * self._share, capacity) >= self._target

    def _alone(self, global_batch: float) -> int:
        batch = global_batch * self._share
        return smallest_capacity_of(self._estimator, self._probabilities, batch, self._target)

    def largest_load(self, slots: int, most: int) -> int:
        """Largest global batch <= most with the target share; 0: none."""
        if slots >= np.count_nonzero(self._probabilities):
            return most

        def holds(global_batch: float) -> bool:
            return self._admits(float(global_batch), slots)

        held = largest(lambda batch: expected_active(self._probabilities, float(batch)) <= slots / 2, most)
        if not holds(held):
            return largest(holds, held) if holds(1) else 0
        while held < most:
            tried = GRID_RATIO ** (math.floor(math.log(held + 1, GRID_RATIO)) + 1)
            if tried >= most:
                return most if holds(most) else largest(holds, most - 1, held)
            if not holds(tried):
                return largest(holds, math.floor(tried), held)
            held = max(held + 1, math.floor(tried))
        return held
