"""Immediate admissibility rate (IAR) of a cache of adapters, and the smallest cache that reaches a target.

Source: InfiniLoRA section 4.2.1, equations 1 to 4 and algorithm 1.
"""

from __future__ import annotations

import numbers

import numpy as np

from moe_lora.workload.popularity.probabilities import Probabilities, checked_capacity, checked_global_batch, checked_probabilities

from .admissibility import AdmissibilityModel
from .capacity_search import smallest_capacity


def immediate_admissibility_rate(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """IAR(M) = sum_i p_i [q_i + (1 - q_i) Pr[at most M - 1 other adapters are resident]], in [0, 1].

    popularity: [N] probability of each adapter, sum 1 (up to a millionth, then scaled to 1).
    global_batch: requests in service over all instances, > 0.  capacity: M, adapters that fit, >= 1.
    Each adapter is resident independently with probability q_i =
    Pr[Poisson(global_batch p_i) > tau] (equations 2 and 3, `AdmissibilityModel`).  1.0 exactly if and only if
    capacity covers every adapter of popularity > 0; otherwise the error is below 1e-9 (1e-12 up to 2048
    different popularities).  Not always non-decreasing in M: see `min_capacity`.
    Raises ValueError for anything else, saying what was given.
    Source: InfiniLoRA equation 4.
    """
    return _model(popularity, global_batch).rate(checked_capacity(capacity))


def min_capacity(popularity: Probabilities, global_batch: float, target: float) -> int:
    """M* = the smallest capacity M with IAR(M) >= target; as a linear scan over M would find it.

    target: in (0, 1]; 1 asks for a place for every adapter of popularity > 0.  A target closer to some IAR(M)
    than that one's error (see `immediate_admissibility_rate`) may be taken as reached or not.
    From the expected number of active adapters up, IAR grows with M, and M* is found by bisection.  Below,
    it can fall when M grows (where a few hot adapters just fit, and no place is left for many cold ones), so
    that stretches of M are skipped only where a bound shows that none of them reaches the target.
    Raises ValueError for bad input, saying what was given.
    Source: InfiniLoRA equation 1 and algorithm 1.
    """
    if isinstance(target, bool) or not (isinstance(target, numbers.Real) and 0 < target <= 1):
        raise ValueError(f"target={target!r} is not allowed; choose an IAR above 0 and up to 1 (0.95 usual)")
    return smallest_capacity(_model(popularity, global_batch), float(target))


def expected_active(popularity: Probabilities, global_batch: float) -> float:
    """sum_i 1 - exp(-lambda_i), lambda_i = global_batch p_i: adapters that at least one request uses.

    Arguments and errors as in `immediate_admissibility_rate`.
    """
    rates = checked_probabilities(popularity) * checked_global_batch(global_batch)
    return float(-np.expm1(-rates).sum())


def _model(popularity: Probabilities, global_batch: float) -> AdmissibilityModel:
    return AdmissibilityModel(checked_probabilities(popularity), checked_global_batch(global_batch))
