# SPDX-License-Identifier: Apache-2.0
"""Popularity shapes and hypothesis strategies that the tests of this folder share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moe_lora.provision.admission.iar import AdmissibilityModel, poisson_tail


def zipf(num_adapters: int, s: float) -> np.ndarray:
    """P(i) ~ 1 / i**s."""
    weights = np.arange(1, num_adapters + 1.0) ** -s
    return weights / weights.sum()


def two_levels(num_hot: int, hot_mass: float, num_cold: int) -> np.ndarray:
    """Hot adapters share hot_mass evenly, cold ones the rest."""
    hot, cold = np.full(num_hot, hot_mass / num_hot), np.full(num_cold, (1 - hot_mass) / num_cold)
    return np.concatenate([hot, cold])


def popularities(max_size: int) -> st.SearchStrategy[np.ndarray]:
    """Any mix of zeros, equal and very unequal weights."""
    weight = st.one_of(st.just(0.0), st.just(1.0), st.floats(-9, 9).map(lambda power: 10.0**power))
    weights = st.lists(weight, min_size=1, max_size=max_size).filter(any)
    return weights.map(lambda values: np.array(values) / np.sum(values))


global_batches = st.floats(-3, 6).map(lambda power: 10.0**power)


def residency(popularity: np.ndarray, global_batch: float, capacity: int) -> tuple[float, np.ndarray]:
    """(tau, q): equation 3's threshold, and equation 2's probability of each adapter."""
    tau = AdmissibilityModel(popularity, global_batch).threshold(capacity)
    return tau, poisson_tail(popularity * global_batch, tau)
