"""IAR over capacity, for plots."""

from __future__ import annotations

import numpy as np

from .admitted import rates_at
from .inputs import PlanInputs

NUM_POINTS = 25


def iar_curves(inputs: PlanInputs, up_to: int) -> dict[str, list[tuple[int, float]]]:
    """(capacity, IAR) points of each estimator at the inputs' load, from 1 to up_to (or all) adapters."""
    most = min(up_to, int(np.count_nonzero(inputs.probabilities)))
    capacities = sorted({round(place) for place in np.linspace(1, most, min(NUM_POINTS, most))})
    curves: dict[str, list[tuple[int, float]]] = {}
    for capacity in capacities:
        for name, rate in rates_at(inputs.probabilities, inputs.adapter_load, capacity).items():
            curves.setdefault(name, []).append((capacity, rate))
    return curves
