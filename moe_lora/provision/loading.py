"""How often adapters are loaded into a LoRA Server, and how busy that keeps its ranks' links."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

BUSY = 0.5
"""Share of the links' time from which on a plan warns that requests wait for loads."""


def loads_per_s(probabilities: NDArray[np.float64], requests_per_s: float, slots: int) -> float:
    """Requests per second whose adapter is in none of `slots` slots, idle ones being given up LRU.

    r * sum_i p_i exp(-r p_i W), where W solves sum_i (1 - exp(-r p_i W)) = slots: an adapter is in its slot
    if it was asked for within the last W seconds.  probabilities: [N], of requests with an adapter, r of them
    per second.  0 if every adapter that is asked for has a slot.
    Source: Che et al., "Hierarchical Web caching systems" (IEEE JSAC 2002).
    """
    rates = requests_per_s * probabilities[probabilities > 0]
    if slots >= len(rates):
        return 0.0

    def too_many(log_window: float) -> float:
        return float(-np.expm1(-rates * math.exp(log_window)).sum()) - slots

    low = high = math.log(slots / rates.sum())
    while too_many(high) < 0:
        high += 1.0
    window_s = math.exp(brentq(too_many, low, high)) if high > low else math.exp(low)
    return float((rates * np.exp(-rates * window_s)).sum())
