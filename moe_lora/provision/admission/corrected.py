# SPDX-License-Identifier: Apache-2.0
"""Immediate admissibility rate (IAR) of a cache with a queue: waiting requests keep slots busy for longer.

A birth-death chain follows the number of wanting adapters: IAR = 1 - sum_{n >= M} Pr[n] sum_i p_i P(i not
active | n).  Derivation: docs/explanation/estimator.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq
from scipy.special import expit, logit

from moe_lora.provision.admission.iar import (
    Probabilities,
    checked_capacity,
    checked_global_batch,
    checked_probabilities,
)

from .iar import BELOW_ONE

NUM_NODES = 40
LARGEST_RATE = 40.0

# Legendre nodes in v = u^(1/3): dense near 0, the steep end.
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(NUM_NODES)
_V = (_ABSCISSAE + 1) / 2
_U = _V**3
_DU = 1.5 * _V**2 * _WEIGHTS


class BusyPeriods:
    """Mean busy periods of M/M/infinity queues with mean service time 1.

    rates: [G] requests per mean service time, clipped to 40.
    """

    def __init__(self, rates: np.ndarray) -> None:
        self._rate_u = np.outer(np.minimum(rates, LARGEST_RATE), _U)
        self._density = np.exp(self._rate_u) * (_DU / _U)
        self.without_wait: np.ndarray = self._density @ _U
        """(exp(lambda) - 1) / lambda, [G]."""

    def after_queue(self, length: int, speeds: np.ndarray) -> np.ndarray:
        """[G]: mean busy periods after a wait for `length` slots, freed at rates `speeds` [G].

        The wait is Erlang: E exp(-s W) = (1 + s / speed)^-length.
        """
        still_one = (1 - _U) * np.exp(-length * np.log1p(self._rate_u / speeds[:, None]))
        return np.einsum("gu,gu->g", self._density, 1 - still_one)


MERGE_WIDTH = 0.02
SMALL_RATE = 1e-3  # of the mean rate: smaller rates merge at any ratio
TOLERANCE = 1e-6  # of mu
MAX_ROUNDS = 100
ROUNDING = 1e-12  # relative; least difference of sums


class DemandState(NamedTuple):
    """The adapters at n wanting adapters."""

    up_rate: float
    down_rate: float
    not_active: float
    num_waiting: float


class SlotDemand:
    """Shares of time and rates, by number of wanting adapters."""

    def __init__(self, probabilities: np.ndarray, global_batch: float, capacity: int) -> None:
        self.num_adapters, self.capacity = len(probabilities), capacity
        self._rates, self._counts, self._mass = _merged(probabilities, global_batch)
        self._busy = BusyPeriods(self._rates)
        self._throughput = 0.0
        self._others_speed = np.ones(len(self._rates))

    def at(self, num_wanting: int) -> DemandState:
        """State n.  Above `capacity`, call with rising n: a fixed point starts from the last."""
        busy = self._busy.without_wait
        if num_wanting <= self.capacity:
            wanting, idle = self._shares(busy, num_wanting)
            active, num_waiting = wanting, 0.0
            self._throughput = float(self._counts @ (active / busy))
        else:
            idle, active, busy = self._with_queue(num_wanting)
            num_waiting = self._num_waiting(1 - idle - active, num_wanting - self.capacity)
        return DemandState(
            up_rate=float((self._counts * self._rates) @ idle),
            down_rate=float(self._counts @ (active / busy)),
            not_active=float(self._mass @ (1 - active)),
            num_waiting=num_waiting,
        )

    def _num_waiting(self, queued: np.ndarray, length: int) -> float:
        """sum_i P(i queues) (1 + lambda_i E[W^2] / 2 E[W]), W Erlang of k stages of rate mu r_i."""
        since = (length + 1) / (2 * self._throughput * self._others_speed)
        return float((self._counts * queued) @ (1 + self._rates * since))

    def _with_queue(self, num_wanting: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """P(idle), P(active) and mean busy period per adapter at the fixed point of mu and r.

        Rounds are limited: near mu = 0 shares no longer depend on mu.
        """
        length = num_wanting - self.capacity
        for _ in range(MAX_ROUNDS):
            speed = self._throughput * self._others_speed
            wait, busy = length / speed, self._busy.after_queue(length, speed)
            wanting, idle = self._shares(wait + busy, num_wanting)
            active = wanting * busy / (wait + busy)
            ends = active / busy
            num_active, num_ends = float(self._counts @ active), float(self._counts @ ends)
            others_ends = np.maximum(num_ends - ends, ROUNDING * num_ends)
            others_active = np.maximum(num_active - active, ROUNDING * num_active)
            self._others_speed = others_ends / others_active * (num_active / num_ends)
            # mu of k queued and M active: sum_i ends_i W_i = k.
            before = self._throughput
            self._throughput = self.capacity / num_active * float(self._counts @ (ends / self._others_speed))
            if abs(self._throughput - before) <= TOLERANCE * before:
                break
        return idle, active, busy

    def _shares(self, period: np.ndarray, num_wanting: int) -> tuple[np.ndarray, np.ndarray]:
        """P(wanting) and P(idle) per adapter, given num_wanting; period: W_i + B_i.

        Independent indicators given their sum, to second order (Edgeworth).
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
        variance = max(float(variances.sum()), ROUNDING)
        skew = float(variances @ (1 - 2 * q)) / variance
        log_odds += (skew - 1 + 2 * q) / (2 * variance)
        return expit(log_odds), expit(-log_odds)


def _merged(probabilities: np.ndarray, global_batch: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rates = np.clip(global_batch * probabilities, np.finfo(float).tiny, LARGEST_RATE)
    small = SMALL_RATE * rates.mean()
    _, group = np.unique(np.floor(np.log(rates + small) / MERGE_WIDTH), return_inverse=True)
    counts = np.bincount(group).astype(float)
    return np.bincount(group, rates) / counts, counts, np.bincount(group, probabilities)


GRID_RATIO = 1.3


def corrected_admissibility_rate(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """Share of requests with an immediate start, in [0, 1]; first come, first served.

    Arguments and errors as in `immediate_admissibility_rate`.  The result is 1.0 if and only if every used
    adapter fits.
    """
    demand = _demand(popularity, global_batch, capacity)
    return 1.0 if demand is None else min(1.0 - _refused(demand)[0], BELOW_ONE)


def corrected_wait(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """Mean wait without an immediate start, in mean service times (Little's law); 0.0 without waits.

    Arguments and errors as in `corrected_admissibility_rate`.
    """
    demand = _demand(popularity, global_batch, capacity)
    if demand is None:
        return 0.0
    turned_away, num_waiting = _refused(demand)
    return num_waiting / (turned_away * global_batch) if turned_away > 1 - BELOW_ONE else 0.0


def _demand(popularity: Probabilities, global_batch: float, capacity: int) -> SlotDemand | None:
    probabilities = checked_probabilities(popularity)
    batch, slots = checked_global_batch(global_batch), checked_capacity(capacity)
    used = probabilities[probabilities > 0]
    return None if slots >= len(used) else SlotDemand(used, batch, slots)


def _refused(demand: SlotDemand) -> tuple[float, float]:
    """sum_{n >= M} Pr[n] P(adapter of a request not active | n), and mean waiting requests."""
    capacity, num_adapters = demand.capacity, demand.num_adapters
    below = capacity - _distances(capacity)[::-1]
    above = capacity + _distances(num_adapters - capacity)
    up_below, down_below, _, _ = _columns(demand, below)
    up_above, down_above, not_active, num_waiting = _columns(demand, above)
    idle_below, idle_above = num_adapters - below, num_adapters - above
    log_steps = [
        _log_rates(below, up_below, idle_below)[:-1] - _log_rates(below[1:], down_below[1:], below[1:]),
        _log_rates(above[:-1], up_above[:-1], idle_above[:-1]) - _log_rates(above, down_above, above)[1:],
    ]
    log_weights = np.concatenate([[0.0], np.cumsum(np.concatenate(log_steps))])
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    whole = np.arange(capacity, num_adapters + 1)
    refused = float(weights[capacity:] @ PchipInterpolator(above, not_active)(whole))
    waiting = float(weights[capacity:] @ PchipInterpolator(above, num_waiting)(whole))
    return min(max(refused, 0.0), 1.0), max(waiting, 0.0)


def _distances(last: int) -> np.ndarray:
    distances = [0]
    while distances[-1] < last:
        distances.append(min(last, max(distances[-1] + 1, int(distances[-1] * GRID_RATIO))))
    return np.unique([*distances, last - 1])


def _columns(demand: SlotDemand, grid: np.ndarray) -> list[np.ndarray]:
    return [np.array(column) for column in zip(*(demand.at(int(n)) for n in grid), strict=True)]


def _log_rates(grid: np.ndarray, rates: np.ndarray, num_sources: np.ndarray) -> np.ndarray:
    whole = np.arange(grid[0], grid[-1] + 1)
    if len(grid) == 1:
        return np.log(rates)
    sources = np.interp(whole, grid, num_sources)
    return PchipInterpolator(grid, np.log(rates / num_sources))(whole) + np.log(sources)
