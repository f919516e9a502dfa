"""Immediate admissibility rate (IAR) of a cache of adapters, and the smallest cache that reaches a target.

Source: InfiniLoRA section 4.2.1, equations 1 to 4 and algorithm 1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np

from .admissibility import AdmissibilityModel, poisson_tail
from .capacity_search import smallest_capacity

SUM_TOLERANCE = 1e-6

Probabilities = Sequence[float] | np.ndarray


def immediate_admissibility_rate(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """IAR(M) = sum_i p_i [q_i + (1 - q_i) Pr[at most M - 1 other adapters are resident]], in [0, 1].

    popularity: [N] probability of each adapter, sum 1 (up to a millionth, then scaled to 1).
    global_batch: requests in service over all instances, > 0.  capacity: M, adapters that fit, >= 1.
    Each adapter is resident independently with probability q_i (see `residency`).  1.0 exactly if and only if
    capacity covers every adapter of popularity > 0; otherwise the error is below 1e-9 (1e-12 up to 2048
    different popularities).  Not always non-decreasing in M: see `min_capacity`.
    Raises ValueError for anything else, saying what was given.
    Source: InfiniLoRA equation 4.
    """
    return _model(popularity, global_batch).rate(_checked_capacity(capacity))


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
    if not (isinstance(target, numbers.Real) and 0 < target <= 1):
        raise ValueError(f"target={target!r} is not allowed; choose an IAR above 0 and up to 1 (0.95 usual)")
    return smallest_capacity(_model(popularity, global_batch), float(target))


def expected_active(popularity: Probabilities, global_batch: float) -> float:
    """sum_i 1 - exp(-lambda_i), lambda_i = global_batch p_i: adapters that at least one request uses.

    Arguments and errors as in `immediate_admissibility_rate`.
    """
    rates = _checked_popularity(popularity) * _checked_batch(global_batch)
    return float(-np.expm1(-rates).sum())


def residency(popularity: Probabilities, global_batch: float, capacity: int) -> tuple[float, np.ndarray]:
    """(tau, q): the threshold, and q_i = Pr[Poisson(lambda_i) > tau] = P(tau + 1, lambda_i) for each adapter.

    P is the regularised lower incomplete gamma function, lambda_i = global_batch p_i.  tau solves
    sum_i q_i = capacity where that gives tau >= 0; otherwise fewer adapters are active than fit, none that is
    active is turned away, and tau = 0.  q: [N], 0 where the popularity is 0.
    Arguments and errors as in `immediate_admissibility_rate`.
    Source: InfiniLoRA equations 2 and 3.
    """
    probabilities = _checked_popularity(popularity)
    model = _model(probabilities, global_batch)
    tau = model.threshold(_checked_capacity(capacity))
    return tau, poisson_tail(probabilities * global_batch, tau)


def _model(popularity: Probabilities, global_batch: float) -> AdmissibilityModel:
    return AdmissibilityModel(_checked_popularity(popularity), _checked_batch(global_batch))


def _checked_popularity(popularity: Probabilities) -> np.ndarray:
    probabilities = np.asarray(popularity, dtype=float)
    if probabilities.ndim != 1 or not len(probabilities):
        raise ValueError(f"popularity has shape {probabilities.shape}; give one probability per adapter")
    bad = np.flatnonzero(~(np.isfinite(probabilities) & (probabilities >= 0)))
    if len(bad):
        raise ValueError(
            f"popularity[{bad[0]}]={probabilities[bad[0]]} is not a probability; give finite numbers >= 0"
        )
    total = float(probabilities.sum())
    if not math.isclose(total, 1.0, rel_tol=SUM_TOLERANCE):
        raise ValueError(f"popularity sums to {total:.9g}, not 1; divide each value by the sum of all")
    return probabilities / total


def _checked_batch(global_batch: float) -> float:
    if not (isinstance(global_batch, numbers.Real) and math.isfinite(global_batch) and global_batch > 0):
        raise ValueError(f"global_batch={global_batch!r} is not allowed; give requests in service, > 0")
    return float(global_batch)


def _checked_capacity(capacity: int) -> int:
    if isinstance(capacity, bool) or not isinstance(capacity, numbers.Integral) or capacity < 1:
        raise ValueError(f"capacity={capacity!r} is not allowed; give a whole number of adapters, 1 or more")
    return int(capacity)
