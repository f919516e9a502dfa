"""Immediate admissibility rate of a cache whose refused requests wait, and so keep slots busy for longer.

Call an adapter wanting while requests of it are in service (it is active: it holds a slot) or wait for a slot.
The number n of wanting adapters is followed as a birth-death chain, M slots:

- A wanting adapter spends a mean W in the queue and B_i in its slot, an idle one 1 / lambda_i until its next
  request.  Were adapters independent, they would be wanting with odds z lambda_i (W + B_i); z is such that
  the expected number is n (the tilt by which a product form is conditioned on its sum).
- k = max(n - M, 0) adapters queue.  Slots free at rate mu = sum_i P(i active) / B_i, so W = k / mu, and the
  requests that came during the wait start together and lengthen B_i (`BusyPeriods`).  mu is a fixed point.
- From n the chain goes up at sum_i lambda_i P(i idle | n) and down at mu(n).

The stationary weights of n follow from detailed balance.  A request is turned away if its adapter is not
active while n >= M, so IAR = 1 - sum_{n >= M} Pr[n] sum_i p_i P(i not active | n): Poisson arrivals see time
averages.  Without a queue this is exact up to the accuracy of P(i | n), as the chain's rates are those of a
product form; with one it takes each n as lasting long enough for the adapters to reach their shares at it.

No constant here is fitted: what is chosen are numerical tolerances.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq
from scipy.special import expit, logit

from moe_lora.workload.probabilities import (
    Probabilities,
    checked_capacity,
    checked_global_batch,
    checked_probabilities,
)

from .busy_period import LARGEST_RATE, BusyPeriods

MERGE_WIDTH = 0.02  # rates this close, relatively, are taken as one
SMALL_RATE = 1e-3  # of the mean rate: below, rates may be merged whatever their ratio
GRID_RATIO = 1.3  # between distances from M at which the chain's rates are computed
TOLERANCE = 1e-6  # of mu
MAX_ROUNDS = 100


def corrected_admissibility_rate(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """Share of requests that start at once, in [0, 1], if those that can't wait first come first served.

    popularity: [N] probability of each adapter, sum 1 (up to a millionth, then scaled to 1).
    global_batch: mean number of requests in service, > 0.  capacity: adapters that fit, >= 1.
    1.0 if capacity covers every adapter of popularity > 0.  Arrivals are Poisson, services exponential with
    mean 1: the process of `moe_lora.sim.admission`, which this agrees with (docs/provisioning.md).
    Raises ValueError for anything else, saying what was given.
    """
    probabilities = checked_probabilities(popularity)
    batch, slots = checked_global_batch(global_batch), checked_capacity(capacity)
    used = probabilities[probabilities > 0]
    if slots >= len(used):
        return 1.0
    return 1.0 - _turned_away(SlotDemand(used, batch, slots))


class DemandState(NamedTuple):
    """The adapters while n of them are wanting."""

    up_rate: float
    down_rate: float
    not_active: float
    """Share of the requests whose adapter isn't active."""


class SlotDemand:
    """Shares of time of each adapter, and the chain's rates, at a given number of wanting adapters."""

    def __init__(self, probabilities: np.ndarray, global_batch: float, capacity: int) -> None:
        self.num_adapters, self.capacity = len(probabilities), capacity
        self._rates, self._counts, self._mass = _merged(probabilities, global_batch)
        self._busy = BusyPeriods(self._rates)
        self._throughput = 0.0

    def at(self, num_wanting: int) -> DemandState:
        """State n. Above `capacity`, ask for rising n: each starts its fixed point from the one before."""
        busy = self._busy.without_wait
        if num_wanting <= self.capacity:
            wanting, idle = self._shares(busy, num_wanting)
            active = wanting
            self._throughput = float(self._counts @ (active / busy))
        else:
            idle, active, busy = self._with_queue(num_wanting)
        return DemandState(
            up_rate=float((self._counts * self._rates) @ idle),
            down_rate=float(self._counts @ (active / busy)),
            not_active=float(self._mass @ (1 - active)),
        )

    def _with_queue(self, num_wanting: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        length = num_wanting - self.capacity
        for _ in range(MAX_ROUNDS):
            busy = self._busy.after_queue(length, self._throughput)
            wait = length / self._throughput
            wanting, idle = self._shares(wait + busy, num_wanting)
            active = wanting * busy / (wait + busy)
            before = self._throughput
            # M slots times the mean of 1 / B_i over the active.
            self._throughput = self.capacity * float((self._counts @ (active / busy)) / (self._counts @ active))
            if abs(self._throughput - before) <= TOLERANCE * before:
                break
        return idle, active, busy

    def _shares(self, period: np.ndarray, num_wanting: int) -> tuple[np.ndarray, np.ndarray]:
        """P(wanting) and P(idle) of each adapter given the number that want, its period being W + B_i.

        Independent indicators with probabilities q_i, sum_i q_i = n, given that their sum is n: to second
        order (Edgeworth) the log odds change by (gamma - 1 + 2 q_i) / (2 s^2), with s^2 the variance of the
        sum and gamma its third cumulant over s^2.
        """
        if num_wanting in (0, self.num_adapters):
            wanting = np.full(len(period), float(num_wanting > 0))
            return wanting, 1 - wanting
        log_odds = np.log(self._rates * period)
        target = logit(num_wanting / self.num_adapters)
        tilt = brentq(
            lambda at: self._counts @ expit(log_odds + at) - num_wanting,
            target - log_odds.max() - 1,
            target - log_odds.min() + 1,
        )
        log_odds += tilt
        q = expit(log_odds)
        variances = self._counts * q * expit(-log_odds)
        variance = max(float(variances.sum()), np.finfo(float).tiny)
        skew = float(variances @ (1 - 2 * q)) / variance
        log_odds += (skew - 1 + 2 * q) / (2 * variance)
        return expit(log_odds), expit(-log_odds)


def _merged(probabilities: np.ndarray, global_batch: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean rate, number and mass of the adapters of each merged group: [G] each.

    Rates below a thousandth of the mean make less than a thousandth of all requests.
    """
    rates = np.minimum(global_batch * probabilities, LARGEST_RATE)
    small = SMALL_RATE * global_batch / len(rates)
    _, group = np.unique(np.floor(np.log(rates + small) / MERGE_WIDTH), return_inverse=True)
    counts = np.bincount(group).astype(float)
    return np.bincount(group, rates) / counts, counts, np.bincount(group, probabilities)


def _turned_away(demand: SlotDemand) -> float:
    """sum_{n >= M} Pr[n] P(adapter of a request not active | n)."""
    capacity, num_adapters = demand.capacity, demand.num_adapters
    below = capacity - _distances(capacity)[::-1]
    above = capacity + _distances(num_adapters - capacity)
    up_below, down_below, _ = _columns(demand, below)
    up_above, down_above, not_active = _columns(demand, above)
    log_up = np.concatenate([_interpolated(below, up_below)[:-1], _interpolated(above, up_above)[:-1]])
    log_down = np.concatenate([_interpolated(below, down_below)[1:], _interpolated(above, down_above)[1:]])
    log_weights = np.concatenate([[0.0], np.cumsum(log_up - log_down)])
    weights = np.exp(log_weights - log_weights.max())
    refused = PchipInterpolator(above, not_active)(np.arange(capacity, num_adapters + 1))
    return float(min(max(weights[capacity:] @ refused / weights.sum(), 0.0), 1.0))


def _distances(last: int) -> np.ndarray:
    """0, 1, 2, ... growing by GRID_RATIO, up to last - 1 and last (the last state but one has both rates)."""
    distances = [0]
    while distances[-1] < last:
        distances.append(min(last, max(distances[-1] + 1, int(distances[-1] * GRID_RATIO))))
    return np.unique([*distances, last - 1])


def _columns(demand: SlotDemand, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    up, down, not_active = zip(*(demand.at(int(n)) for n in grid), strict=True)
    return np.array(up), np.array(down), np.array(not_active)


def _interpolated(grid: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Logarithms of the rates at every whole number of the grid's range; -inf where a rate is 0 at an end."""
    whole = np.arange(grid[0], grid[-1] + 1)
    some = rates > 0
    if some.sum() < 2:
        return np.where(np.isin(whole, grid[some]), np.log(rates[some]).sum(), -np.inf)
    values = PchipInterpolator(grid[some], np.log(rates[some]))(whole)
    return np.where((whole < grid[some][0]) | (whole > grid[some][-1]), -np.inf, values)
