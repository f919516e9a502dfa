# SPDX-License-Identifier: Apache-2.0
"""Immediate admissibility rate (IAR) of a cache, and the smallest cache for a target.

Legend: X_j = 1 with probability q_j, S = sum of X_j, S_i = S without adapter i, v = sum q_j (1 - q_j).
Source: InfiniLoRA section 4.2.1, equations 1 to 4 and algorithm 1.
"""

from __future__ import annotations

import math
import numbers
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import dawsn, gammainc, ive

OUTSIDE = 1e-13
NEGLIGIBLE = 37.0  # skips points with a characteristic function below exp(-37)


class Overflow(NamedTuple):
    """Cost of sums at or above the capacity."""

    turned_away: float
    full: float


def overflow(q: np.ndarray, counts: np.ndarray, mass: np.ndarray, capacity: int) -> Overflow:
    """turned_away = sum_i mass_i (1 - q_i) Pr[S_i >= capacity] and full = Pr[S >= capacity].

    q: [G] probabilities.  counts: [G] members, real numbers.  mass: [G] weights, total at most 1.  Reads
    generating functions at roots of unity: error below 1e-13 (Bernstein), plus rounding.
    """
    mean, variance = float(counts @ q), float(counts @ (q * (1 - q)))
    log_inverse = math.log(2 / OUTSIDE)
    reach = log_inverse / 3 + math.sqrt(log_inverse**2 / 9 + 2 * log_inverse * variance)
    begin, end = math.floor(mean - reach) - 1, math.ceil(mean + reach) + 1
    order = (end - begin) | 1  # odd: avoids the point -1, a zero of a factor with q = 1/2
    end = begin + order
    start = max(capacity, begin)
    if start >= end:
        return Overflow(0.0, 0.0)
    missing = float(mass @ (1 - q))
    theta = _angles(order, variance)
    whole, without_one = _generating_functions(q, counts, mass, theta)
    # The sum of exp(-i theta k) over start <= k < end.
    middle, length = (start + end - 1) / 2, end - start
    weights = np.exp(-1j * theta * middle) * (np.sin(theta * length / 2) / np.sin(theta / 2))
    full = (length + 2 * float(np.sum((whole * weights).real))) / order
    turned_away = (length * missing + 2 * float(np.sum((without_one * weights).real))) / order
    return Overflow(min(max(turned_away, 0.0), missing), min(max(full, 0.0), 1.0))


def _angles(order: int, variance: float) -> np.ndarray:
    """Points 2 pi k / order in (0, pi), except negligible."""
    cosine = 1 - NEGLIGIBLE / max(variance - 0.25, 1e-9)  # without one variable: 1/4 less variance
    last = math.pi if cosine <= -1 else math.acos(cosine)
    count = min((order - 1) // 2, math.floor(last * order / (2 * math.pi)) + 1)
    return 2 * math.pi / order * np.arange(1, count + 1)


def _generating_functions(
    q: np.ndarray, counts: np.ndarray, mass: np.ndarray, theta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """P(z) and P(z) sum_i mass_i (1 - q_i) / (1 - q_i + q_i z) at z = exp(i theta)."""
    versine = 2 * np.sin(theta / 2) ** 2
    square = 1 - 2 * np.outer(versine, q * (1 - q))
    real, imaginary = 1 - np.outer(versine, q), np.outer(np.sin(theta), q)
    whole = np.exp(0.5 * (np.log(square) @ counts) + 1j * (np.arctan2(imaginary, real) @ counts))
    missing = mass * (1 - q)
    leave_one_out = (real / square) @ missing - 1j * ((imaginary / square) @ missing)
    return whole, whole * leave_one_out


def largest_probability(variance: float) -> float:
    """Bound on max_k Pr[S = k]: exp(-v) I_0(v)."""
    return float(ive(0, max(variance, 0.0)))


def largest_step(variance: float) -> float:
    """Bound on max_k |Pr[S = k] - Pr[S = k - 1]|: (4 / pi) dawsn(x) / x with x = sqrt(2 v)."""
    root = math.sqrt(2 * variance) if variance > 0 else 0.0
    return 4 / math.pi * (float(dawsn(root)) / root if root > 1e-6 else 1.0)


EXACT_UP_TO = 2048
NUM_NODES = 16
NODES = np.cos(np.pi * (np.arange(NUM_NODES) + 0.5) / NUM_NODES)
COLD = 1e-13  # rates with a smaller sum count as 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RateGroups:
    """sum_i f(lambda_i) ~ counts @ f(rates) and sum_i p_i f(lambda_i) ~ mass @ f(rates), for smooth f.

    rates: [G] requests of an adapter in a global batch.  counts: [G], possibly negative.  mass: [G], total 1.
    """

    rates: np.ndarray
    counts: np.ndarray
    mass: np.ndarray


def group_rates(probabilities: np.ndarray, global_batch: float) -> RateGroups:
    """Groups of equal rates.  Above 2048 distinct rates, crowded panels move to 16 Chebyshev points.

    probabilities: [N], > 0.  On a panel, Poisson tails are polynomials of degree 15 within 1e-11.
    """
    rates = probabilities * global_batch
    cold = rates < COLD / len(rates)
    values, counts = np.unique(rates[~cold], return_counts=True)
    weights = counts.astype(float)
    if len(values) > EXACT_UP_TO:
        values, weights = _to_nodes(values, weights)
    mass = values * weights / global_batch
    if cold.any():
        values = np.append(values, 0.0)
        weights = np.append(weights, float(cold.sum()))
        mass = np.append(mass, probabilities[cold].sum())
    return RateGroups(rates=values, counts=weights, mass=mass)


def _to_nodes(rates: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    place = np.where(rates <= 1, 2 * np.log(rates), 2 * np.sqrt(rates) - 2)
    panel_of, panel = np.unique(np.floor(place), return_inverse=True)[:2]
    crowded = np.bincount(panel) > NUM_NODES
    moved = crowded[panel]
    weights = _node_weights(2 * (place - panel_of[panel])[moved] - 1, panel[moved], counts[moved])
    used = np.flatnonzero(crowded)
    nodes = panel_of[used, None] + (NODES + 1) / 2
    values = np.where(nodes <= 0, np.exp(np.minimum(nodes, 0) / 2), (nodes / 2 + 1) ** 2)
    return (
        np.concatenate([rates[~moved], values.ravel()]),
        np.concatenate([counts[~moved], weights[used].ravel()]),
    )


def _node_weights(x: np.ndarray, panel: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[panels, nodes]: sum over a panel's x of counts times the Lagrange polynomials of the nodes at x."""
    degrees = np.arange(1, NUM_NODES)
    moments = [np.bincount(panel, counts)]
    before, now = np.ones_like(x), x
    for _ in degrees:
        moments.append(2 * np.bincount(panel, counts * now))
        before, now = now, 2 * x * now - before
    chebyshev = np.cos(np.outer(np.arange(NUM_NODES), np.arccos(NODES)))
    return np.stack(moments, axis=1) @ chebyshev / NUM_NODES


BELOW_ONE = math.nextafter(1.0, 0.0)
RECENT = 64


def poisson_tail(rates: np.ndarray, tau: float) -> np.ndarray:
    """Pr[Poisson(rate) > tau] for real tau >= 0."""
    return gammainc(tau + 1, rates)


class AdmissibilityModel:
    """Independence model: an adapter is resident if its load exceeds a common threshold.

    expected_active: the residents at tau = 0.
    """

    def __init__(self, probabilities: np.ndarray, global_batch: float) -> None:
        used = probabilities[probabilities > 0]
        self.num_used = len(used)
        self.groups = groups = group_rates(used, global_batch)
        self._expected_resident = cache(lambda tau: float(groups.counts @ poisson_tail(groups.rates, tau)))
        self.expected_active = self._expected_resident(0.0)
        self._taus: dict[int, float] = {}
        self._resident_above = lru_cache(RECENT)(partial(poisson_tail, self.groups.rates))
        self.overflow = lru_cache(RECENT)(self._overflow)

    def threshold(self, capacity: int) -> float:
        """tau >= 0 with a mean of `capacity` residents; 0 if fewer are active."""
        if capacity >= self.expected_active:
            return 0.0
        if capacity not in self._taus:
            self._taus[capacity] = self._solve(capacity)
        return self._taus[capacity]

    def resident(self, capacity: int) -> np.ndarray:
        """q of each group, [G].  Source: InfiniLoRA equation 2."""
        return self._resident_above(self.threshold(capacity))

    def _overflow(self, capacity: int) -> Overflow:
        return overflow(self.resident(capacity), self.groups.counts, self.groups.mass, capacity)

    def rate(self, capacity: int) -> float:
        """IAR; 1 if and only if every used adapter fits."""
        if capacity >= self.num_used:
            return 1.0
        return min(1.0 - self.overflow(capacity).turned_away, BELOW_ONE)

    def _solve(self, capacity: int) -> float:
        # tau falls with growing capacity.
        above = [tau for other, tau in self._taus.items() if other < capacity]
        below = [tau for other, tau in self._taus.items() if other > capacity]
        low, high = max(below, default=0.0), min(above, default=1.0)
        while self._expected_resident(high) > capacity:
            low, high = high, 2 * high
        if low == high or self._expected_resident(low) <= capacity:
            return low
        return float(brentq(lambda tau: self._expected_resident(tau) - capacity, low, high, xtol=1e-13))


MARGIN = 1e-8  # of the bounds over the errors of their sums


def smallest_capacity(model: AdmissibilityModel, target: float) -> int:
    """Smallest capacity with model.rate(capacity) >= target.

    IAR may fall below the expected active adapters: skips stretches by `least_turned_away`.
    """
    first_monotone = max(1, math.ceil(model.expected_active))
    found = _leftmost(model, target, 1, min(first_monotone, model.num_used) - 1)
    if found is not None:
        return found
    low = min(first_monotone, model.num_used)
    return first_from(low, low, model.num_used, lambda capacity: model.rate(capacity) >= target)


def first_from(near: int, least: int, most: int, reaches: Callable[[int], bool]) -> int:
    """Smallest n >= `least` with reaches(n), for a monotone `reaches` with reaches(most)."""
    step = 1
    if near < most and not reaches(near):
        low, high = near + 1, min(near + step, most)
        while high < most and not reaches(high):
            low, high, step = high + 1, min(high + 2 * step, most), 2 * step
    else:
        low, high = near, near
        while low > least and reaches(low - 1):
            low, high, step = max(least, low - 1 - step), low - 1, 2 * step
    return low + bisect_left(range(low, high), True, key=reaches)


def _leftmost(model: AdmissibilityModel, target: float, low: int, high: int) -> int | None:
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
    """Lower bound of 1 - IAR over capacities from begin to end, below the expected active adapters.

    S has variance at least v = sum q_i (1 - q'_i), with residencies q, q' at both ends.  With h =
    `largest_probability` and d = `largest_step`, T_i = Pr[S_i >= M] obeys:

    - T_i >= 1/2 - q_i h(v - 1/4), by the median of a Bernoulli sum of integer mean (Jogdeo and Samuels 1968).
    - Per step of M, T_i falls by at most (growth of q_i) h(v - 1/4) + 3/2 d(v - 1/2).
    """
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


def immediate_admissibility_rate(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """IAR(M) = sum_i p_i [q_i + (1 - q_i) Pr[at most M - 1 further adapters are resident]], in [0, 1].

    popularity: [N], sum 1 within a millionth.  global_batch: requests in service.  The result is 1.0 if and
    only if every used adapter fits, else within 1e-9, and may fall with growing M.  Raises ValueError for bad
    arguments.  Source: InfiniLoRA equations 2 to 4.
    """
    return _model(popularity, global_batch).rate(checked_capacity(capacity))


def min_capacity(popularity: Probabilities, global_batch: float, target: float) -> int:
    """M*: smallest capacity M with IAR(M) >= target; target in (0, 1].

    Raises ValueError for bad arguments.  Source: InfiniLoRA equation 1 and algorithm 1.
    """
    if isinstance(target, bool) or not (isinstance(target, numbers.Real) and 0 < target <= 1):
        raise ValueError(f"target={target!r} is not allowed; choose an IAR above 0 and up to 1 (0.95 usual)")
    return smallest_capacity(_model(popularity, global_batch), float(target))


def expected_active(popularity: Probabilities, global_batch: float) -> float:
    """sum_i 1 - exp(-lambda_i), lambda_i = global_batch p_i: mean adapters in use.

    Raises ValueError for bad arguments.
    """
    rates = checked_probabilities(popularity) * checked_global_batch(global_batch)
    return float(-np.expm1(-rates).sum())


def _model(popularity: Probabilities, global_batch: float) -> AdmissibilityModel:
    return AdmissibilityModel(checked_probabilities(popularity), checked_global_batch(global_batch))


SUM_TOLERANCE = 1e-6
Probabilities = Sequence[float] | np.ndarray


def checked_probabilities(popularity: Probabilities) -> np.ndarray:
    """[N]: probabilities scaled to sum 1.

    Raises ValueError for no adapter, negative or infinite values, and a sum off by more than a millionth.
    """
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


def checked_global_batch(global_batch: float) -> float:
    """Mean requests in service.  Raises ValueError unless finite and > 0."""
    real = isinstance(global_batch, numbers.Real) and not isinstance(global_batch, bool)
    if not (real and math.isfinite(global_batch) and global_batch > 0):
        raise ValueError(f"global_batch={global_batch!r} is not allowed; give requests in service, > 0")
    return float(global_batch)


def checked_capacity(capacity: int) -> int:
    """Adapter slots.  Raises ValueError unless an integer >= 1."""
    if isinstance(capacity, bool) or not isinstance(capacity, numbers.Integral) or capacity < 1:
        raise ValueError(f"capacity={capacity!r} is not allowed; give a whole number of adapters, 1 or more")
    return int(capacity)
