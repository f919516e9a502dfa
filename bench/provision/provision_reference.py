# SPDX-License-Identifier: Apache-2.0
"""Slow, plain ways to the immediate admissibility rate, for tests and for `bench_provision`.

Source: InfiniLoRA section 4.2.1 and algorithm 1, with a threshold of at least 0
(`moe_lora.provision.admission.iar`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from scipy.special import gammainc

Rate = Callable[[np.ndarray, np.ndarray, int], float]


def threshold(rates: np.ndarray, capacity: int, halvings: int = 100) -> float:
    """Line 5 by binary search: tau >= 0 with sum_i Pr[Poisson(rate_i) > tau] = capacity, or 0."""
    if gammainc(1.0, rates).sum() <= capacity:
        return 0.0
    low, high = 0.0, 1.0
    while gammainc(high + 1, rates).sum() > capacity:
        high *= 2
    for _ in range(halvings):
        middle = (low + high) / 2
        if gammainc(middle + 1, rates).sum() > capacity:
            low = middle
        else:
            high = middle
    return high


def residencies(p: np.ndarray, global_batch: float, capacity: int, halvings: int = 100) -> np.ndarray:
    """Line 6: q_i = Pr[Poisson(rate_i) > tau]."""
    return gammainc(threshold(p * global_batch, capacity, halvings) + 1, p * global_batch)


def rate_by_enumeration(p: np.ndarray, q: np.ndarray, capacity: int) -> float:
    """Equation 4 over all 2^N states of the cache."""
    found = 0.0
    for state in itertools.product((0, 1), repeat=len(q)):
        chance = float(np.prod(np.where(state, q, 1 - q)))
        for i, resident in enumerate(state):
            if resident or sum(state) <= capacity - 1:
                found += p[i] * chance
    return found


def rate_as_printed(p: np.ndarray, q: np.ndarray, capacity: int) -> float:
    """Lines 7 to 18: a dynamic program per adapter, O(N^3)."""
    num_adapters, found = len(q), 0.0
    for i in range(num_adapters):
        dp = [1.0] + [0.0] * num_adapters
        for j in range(num_adapters):
            if j == i:
                continue
            for k in range(num_adapters - 1, 0, -1):
                dp[k] = dp[k] * (1 - q[j]) + dp[k - 1] * q[j]
            dp[0] *= 1 - q[j]
        found += p[i] * (q[i] + (1 - q[i]) * sum(dp[:capacity]))
    return found


def rate_as_printed_vectorised(p: np.ndarray, q: np.ndarray, capacity: int) -> float:
    """The same dynamic programs, for all adapters and all counts at once: N steps on an N x N array."""
    num_adapters = len(q)
    dp = np.zeros((num_adapters, num_adapters))
    dp[:, 0] = 1.0
    moved = np.empty_like(dp)
    for j in range(num_adapters):
        without_itself = dp[j].copy()
        np.multiply(dp, q[j], out=moved)
        dp -= moved
        dp[:, 1:] += moved[:, :-1]
        dp[j] = without_itself
    return float(p @ (q + (1 - q) * dp[:, :capacity].sum(axis=1)))


def rate_by_convolution(p: np.ndarray, q: np.ndarray, capacity: int) -> float:
    """1 - E[(mass of the absent adapters) 1{S >= capacity}], by pairwise convolution: for large N.

    Each block of adapters has f(k) = Pr[S = k] and g(k) = E[mass of its absent adapters, S = k]; two blocks
    make f = f1 * f2 and g = g1 * f2 + f1 * g2.
    """
    num_blocks = 1 << (len(q) - 1).bit_length()
    absent = np.zeros(num_blocks)  # padding blocks: adapters without requests
    f = np.stack([np.ones(num_blocks), absent], axis=1)
    g = np.zeros_like(f)
    f[: len(q), 0], f[: len(q), 1], g[: len(q), 0] = 1 - q, q, p * (1 - q)
    while len(f) > 1:
        width = 2 * f.shape[1] - 1
        f_hat, g_hat = np.fft.rfft(f, 2 * width), np.fft.rfft(g, 2 * width)
        g_hat = g_hat[::2] * f_hat[1::2] + f_hat[::2] * g_hat[1::2]
        f_hat = f_hat[::2] * f_hat[1::2]
        f, g = (np.fft.irfft(both, 2 * width)[:, :width] for both in (f_hat, g_hat))
    return 1.0 - float(g[0, capacity:].sum())


def min_capacity_by_scan(p: np.ndarray, global_batch: float, target: float, rate: Rate) -> int:
    """Algorithm 1: the first M = 1, 2, ... with IAR >= target, by the given method."""
    for capacity in range(1, len(p)):
        if rate(p, residencies(p, global_batch, capacity), capacity) >= target:
            return capacity
    return len(p)
