"""The smallest capacity whose IAR reaches a target, without trying each.

Write turned_away(M) = 1 - IAR(M) = sum_i p_i (1 - q_i) T_i, T_i = Pr[S_i >= M], S_i the number of resident
adapters other than i.

From the expected number of active adapters A up, tau = 0 and only M grows, so IAR grows: steps that double,
then bisection.

Below A, sum_i q_i = M, and when M grows every q_i grows and the mean of S with it: T_i may grow too, and IAR
fall.  Over all capacities in [a, b], b <= A, with q, q' the residencies at a and b, every S has variance at
least v = sum q_i (1 - q'_i), and two bounds hold (h = `largest_probability`, d = `largest_step`):

- The median of a sum of Bernoulli variables whose mean is whole is that mean (Jogdeo and Samuels 1968), so
  T_i >= 1/2 - q_i h(v - 1/4).
- From M to M + 1, Pr[S_i >= M + 1] rises by sum_j q_j-growth Pr[S_ij = M], and the growths sum to 1, while
  Pr[S_i = M] is lost: as Pr[S_ij = M] differs from it by at most 3/2 d(v - 1/2) on average, T_i falls by at
  most (growth of q_i) h(v - 1/4) + 3/2 d(v - 1/2) per step.

A stretch whose bound exceeds what may be turned away is skipped; others are halved, the lower half first.
"""

from __future__ import annotations

import math

from .admissibility import AdmissibilityModel
from .poisson_binomial import largest_probability, largest_step

MARGIN = 1e-8  # of the bounds over the errors of the sums in them


def smallest_capacity(model: AdmissibilityModel, target: float) -> int:
    """The smallest capacity with model.rate(capacity) >= target; the number of used adapters always has."""
    first_monotone = max(1, math.ceil(model.expected_active))
    found = _leftmost(model, target, 1, min(first_monotone, model.num_used) - 1)
    if found is not None:
        return found
    return _bisect(model, target, min(first_monotone, model.num_used))


def _bisect(model: AdmissibilityModel, target: float, low: int) -> int:
    """The smallest capacity from low up that reaches the target, where the rate grows with the capacity."""
    high, step = low, 1
    while high < model.num_used and model.rate(high) < target:  # the answer is mostly near
        low, high, step = high + 1, min(high + step, model.num_used), 2 * step
    while low < high:
        middle = (low + high) // 2
        if model.rate(middle) >= target:
            high = middle
        else:
            low = middle + 1
    return low


def _leftmost(model: AdmissibilityModel, target: float, low: int, high: int) -> int | None:
    """The smallest capacity in [low, high], all below the expected active, that reaches the target."""
    stretches = [(low, high)]
    while stretches:
        begin, end = stretches.pop()
        if begin > end or least_turned_away(model, begin, end) > 1 - target + MARGIN:
            continue
        if begin == end:
            if model.rate(begin) >= target:
                return begin
            continue
        middle = (begin + end) // 2
        stretches += [(middle + 1, end), (begin, middle)]
    return None


def least_turned_away(model: AdmissibilityModel, begin: int, end: int) -> float:
    """A lower bound of 1 - IAR over all capacities from begin to end, which is below the expected active."""
    counts, mass = model.groups.counts, model.groups.mass
    q, q_end = model.resident(begin), model.resident(end)
    variance = float(counts @ (q * (1 - q_end)))
    peak = largest_probability(variance - 0.25)
    missing = mass * (1 - q_end)
    by_median = float(missing @ (0.5 - peak * q_end))
    growth = q_end - q
    fall = peak * growth + 1.5 * largest_step(variance - 0.5) * (end - begin)
    now = model.overflow(begin)
    by_step = now.turned_away - float(mass @ growth) * now.full - float(missing @ fall)
    return max(by_median, by_step)
