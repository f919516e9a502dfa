"""IAR over capacity, for plots."""

from __future__ import annotations

import numpy as np

from .admitted import rates_at
from moe_lora.provision.plan.inputs import PlanInputs

NUM_POINTS = 25


def iar_curves(inputs: PlanInputs, global_batch: float, up_to: int) -> dict[str, list[tuple[int, float]]]:
    """(capacity, IAR) points of each estimator at a global batch, from 1 to up_to (or all) adapters."""
    batch = global_batch * inputs.adapter_share
    most = min(up_to, int(np.count_nonzero(inputs.probabilities)))
    capacities = sorted({round(place) for place in np.linspace(1, most, min(NUM_POINTS, most))})
    curves: dict[str, list[tuple[int, float]]] = {}
    for capacity in capacities:
        for name, rate in rates_at(inputs.probabilities, batch, capacity).items():
            curves.setdefault(name, []).append((capacity, rate))
    return curves
