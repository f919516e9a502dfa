"""Shares of time of adapters that share few slots, given how many of them hold or want one.

The symbols and the reasons are those of `moe_lora.provision.admission.corrected`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit

from .busy_period import LARGEST_RATE, BusyPeriods

MERGE_WIDTH = 0.02  # rates this close, relatively, are taken as one
SMALL_RATE = 1e-3  # of the mean rate: below, rates may be merged whatever their ratio
TOLERANCE = 1e-6  # of mu
MAX_ROUNDS = 100
ROUNDING = 1e-12  # differences of sums are not taken for less, relatively


class DemandState(NamedTuple):
    """The adapters while n of them are wanting."""

    up_rate: float
    down_rate: float
    not_active: float
    """Share of the requests whose adapter isn't active."""
    num_waiting: float
    """Requests that wait for a slot."""


class SlotDemand:
    """Shares of time of each adapter, and the chain's rates, at a given number of wanting adapters."""

    def __init__(self, probabilities: np.ndarray, global_batch: float, capacity: int) -> None:
        self.num_adapters, self.capacity = len(probabilities), capacity
        self._rates, self._counts, self._mass = _merged(probabilities, global_batch)
        self._busy = BusyPeriods(self._rates)
        self._throughput = 0.0
        self._others_speed = np.ones(len(self._rates))

    def at(self, num_wanting: int) -> DemandState:
        """State n. Above `capacity`, ask for rising n: each starts its fixed point from the one before."""
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
        """sum_i P(i queues) (1 + lambda_i E[W^2] / 2 E[W]): its first request, and those that came since.

        W is Erlang, k stages of rate mu r_i: E[W^2] / 2 E[W] = (k + 1) / (2 mu r_i).
        """
        since = (length + 1) / (2 * self._throughput * self._others_speed)
        return float((self._counts * queued) @ (1 + self._rates * since))

    def _with_queue(self, num_wanting: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """P(idle), P(active) and mean busy period of each adapter at the fixed point of mu and r.

        It is near after a few rounds.  Where adapters that are always active fill the slots, mu is next to 0
        and converges slowly, but then the shares no longer depend on it: the rounds are limited.
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
            # The mu at which k adapters queue and M are active: sum_i ends_i W_i = k.
            before = self._throughput
            self._throughput = self.capacity / num_active * float(self._counts @ (ends / self._others_speed))
            if abs(self._throughput - before) <= TOLERANCE * before:
                break
        return idle, active, busy

    def _shares(self, period: np.ndarray, num_wanting: int) -> tuple[np.ndarray, np.ndarray]:
        """P(wanting) and P(idle) of each adapter given the number that want; period: W_i + B_i.

        Independent indicators with probabilities q_i, sum_i q_i = n, given that their sum is n: to second
        order (Edgeworth) the log odds change by (g - 1 + 2 q_i) / (2 s^2), with s^2 the variance of the sum
        and g its third cumulant over s^2.
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
    """Mean rate, number and mass of the adapters of each merged group: [G] each.

    Rates below a thousandth of the mean make less than a thousandth of all requests.
    """
    rates = np.clip(global_batch * probabilities, np.finfo(float).tiny, LARGEST_RATE)
    small = SMALL_RATE * rates.mean()
    _, group = np.unique(np.floor(np.log(rates + small) / MERGE_WIDTH), return_inverse=True)
    counts = np.bincount(group).astype(float)
    return np.bincount(group, rates) / counts, counts, np.bincount(group, probabilities)
