"""Sums of independent Bernoulli variables in many groups, from a few points of their characteristic function.

X_j = 1 with probability q_j, S = sum of X_j, S_i the same without adapter i; variance v = sum q_j (1 - q_j).
On the unit circle |E z^S| <= exp(-v (1 - cos theta)): the larger the sum, the fewer points count, about 25
whatever its size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import dawsn, ive

OUTSIDE = 1e-13  # probability that may lie outside the window
NEGLIGIBLE = 37.0  # points where the characteristic function is below exp(-37) are left out


class Overflow(NamedTuple):
    """What a sum that reaches the capacity costs."""

    turned_away: float
    full: float


def overflow(q: np.ndarray, counts: np.ndarray, mass: np.ndarray, capacity: int) -> Overflow:
    """turned_away = sum_i mass_i (1 - q_i) Pr[S_i >= capacity] and full = Pr[S >= capacity].

    q: [G] probabilities in [0, 1] of the groups' members.  counts: [G] members (real numbers are fine).
    mass: [G] total weight of a group's members in the first sum, whose weights sum to at most 1.
    Both results come from the generating functions P(z) = prod_j (1 - q_j + q_j z)^counts_j and
    P(z) sum_i mass_i (1 - q_i) / (1 - q_i + q_i z), read at the roots of unity of an odd order W.
    Coefficients that are W apart fall together there, so the error is at most the probability outside a
    window of W values, below 1e-13 by Bernstein's inequality, plus rounding (1e-12 at 10^6 adapters).
    """
    mean, variance = float(counts @ q), float(counts @ (q * (1 - q)))
    log_inverse = math.log(2 / OUTSIDE)
    reach = log_inverse / 3 + math.sqrt(log_inverse**2 / 9 + 2 * log_inverse * variance)
    begin, end = math.floor(mean - reach) - 1, math.ceil(mean + reach) + 1
    order = (end - begin) | 1  # odd: no point is -1, where a factor with q = 1/2 would be 0
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
    """The points 2 pi k / order in (0, pi) at which the characteristic function is not negligible."""
    cosine = 1 - NEGLIGIBLE / max(variance - 0.25, 1e-9)  # one variable is left out: 1/4 less variance
    last = math.pi if cosine <= -1 else math.acos(cosine)
    count = min((order - 1) // 2, math.floor(last * order / (2 * math.pi)) + 1)
    return 2 * math.pi / order * np.arange(1, count + 1)


def _generating_functions(
    q: np.ndarray, counts: np.ndarray, mass: np.ndarray, theta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """P(z) and P(z) sum_i mass_i (1 - q_i) / (1 - q_i + q_i z) at z = exp(i theta)."""
    versine = 2 * np.sin(theta / 2) ** 2  # 1 - cos(theta)
    square = 1 - 2 * np.outer(versine, q * (1 - q))
    real, imaginary = 1 - np.outer(versine, q), np.outer(np.sin(theta), q)
    whole = np.exp(0.5 * (np.log(square) @ counts) + 1j * (np.arctan2(imaginary, real) @ counts))
    missing = mass * (1 - q)
    leave_one_out = (real / square) @ missing - 1j * ((imaginary / square) @ missing)
    return whole, whole * leave_one_out


def largest_probability(variance: float) -> float:
    """Bound on max_k Pr[S = k]: exp(-v) I_0(v), the mean of exp(-v (1 - cos theta)) over the circle."""
    return float(ive(0, max(variance, 0.0)))


def largest_step(variance: float) -> float:
    """Bound on max_k |Pr[S = k] - Pr[S = k - 1]|: the mean of |1 - z| exp(-v (1 - cos theta)).

    With c = cos(theta / 2) the integral is Dawson's: (4 / pi) dawsn(x) / x, x = sqrt(2 v).
    """
    root = math.sqrt(2 * variance) if variance > 0 else 0.0
    return 4 / math.pi * (float(dawsn(root)) / root if root > 1e-6 else 1.0)
