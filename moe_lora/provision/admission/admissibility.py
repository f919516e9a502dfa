"""The independence model of a cache: each adapter is resident when its load exceeds one common threshold."""

from __future__ import annotations

import math
from functools import cache, lru_cache, partial

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc

from .poisson_binomial import Overflow, overflow
from .rate_groups import RateGroups, group_rates

BELOW_ONE = math.nextafter(1.0, 0.0)
RECENT = 64


def poisson_tail(rates: np.ndarray, tau: float) -> np.ndarray:
    """Pr[Poisson(rate) > tau] for real tau >= 0: the regularised lower gamma function P(tau + 1, rate)."""
    return gammainc(tau + 1, rates)


class AdmissibilityModel:
    """Thresholds, residency and IAR at any capacity for one popularity and global batch.

    num_used: adapters of popularity > 0.  expected_active: sum_i 1 - exp(-lambda_i), the most that are
    resident at tau >= 0.
    """

    def __init__(self, probabilities: np.ndarray, global_batch: float) -> None:
        used = probabilities[probabilities > 0]
        self.num_used = len(used)
        self.groups: RateGroups = group_rates(used, global_batch)
        # A search comes back to a capacity and starts from the thresholds of its neighbours.
        self._expected_resident = cache(self._sum_of_tails)
        self.expected_active = self._expected_resident(0.0)
        self._taus: dict[int, float] = {}
        self._resident_above = lru_cache(RECENT)(partial(poisson_tail, self.groups.rates))
        self.overflow = lru_cache(RECENT)(self._overflow)

    def threshold(self, capacity: int) -> float:
        """tau >= 0 at which `capacity` adapters are resident on average; 0 where fewer are active."""
        if capacity >= self.expected_active:
            return 0.0
        if capacity not in self._taus:
            self._taus[capacity] = self._solve(capacity)
        return self._taus[capacity]

    def resident(self, capacity: int) -> np.ndarray:
        """q of each group, [G]. Source: InfiniLoRA equation 2."""
        return self._resident_above(self.threshold(capacity))

    def _overflow(self, capacity: int) -> Overflow:
        """Share of requests turned away, 1 - IAR, and the probability that the places are all taken."""
        return overflow(self.resident(capacity), self.groups.counts, self.groups.mass, capacity)

    def rate(self, capacity: int) -> float:
        """IAR: 1 exactly if and only if every adapter that is used at all has a place."""
        if capacity >= self.num_used:
            return 1.0
        return min(1.0 - self.overflow(capacity).turned_away, BELOW_ONE)

    def _sum_of_tails(self, tau: float) -> float:
        return float(self.groups.counts @ poisson_tail(self.groups.rates, tau))

    def _solve(self, capacity: int) -> float:
        # tau falls when the capacity grows.
        above = [tau for other, tau in self._taus.items() if other < capacity]
        below = [tau for other, tau in self._taus.items() if other > capacity]
        low, high = max(below, default=0.0), min(above, default=1.0)
        while self._expected_resident(high) > capacity:
            low, high = high, 2 * high
        if low == high or self._expected_resident(low) <= capacity:
            return low
        return float(brentq(lambda tau: self._expected_resident(tau) - capacity, low, high, xtol=1e-13))
