# SPDX-License-Identifier: Apache-2.0
"""Shares of time at a given number of wanting adapters: enumeration, symmetry, conservation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from moe_lora.provision.admission.corrected import SlotDemand

UNEQUAL = np.array([0.4, 0.25, 0.15, 0.1, 0.04, 0.03, 0.02, 0.01])


def product_form(probabilities: np.ndarray, global_batch: float, num_active: int) -> tuple[float, float]:
    """Rate of new adapters, and share of requests whose adapter isn't active, given so many are active.

    Pr[set S active] ~ product over S of exp(lambda_i) - 1.
    """
    rates = global_batch * probabilities
    odds = np.expm1(rates)
    total = up_rate = not_active = 0.0
    for active in itertools.combinations(range(len(rates)), num_active):
        weight = math.prod(odds[list(active)])
        idle = [index for index in range(len(rates)) if index not in active]
        total += weight
        up_rate += weight * rates[idle].sum()
        not_active += weight * probabilities[idle].sum()
    return up_rate / total, not_active / total


@pytest.mark.parametrize("num_active", range(9))
@pytest.mark.parametrize("global_batch", [0.5, 4.0, 12.0])
def test_without_a_queue_it_is_near_the_product_form(global_batch: float, num_active: int) -> None:
    state = SlotDemand(UNEQUAL, global_batch, capacity=8).at(num_active)
    up_rate, not_active = product_form(UNEQUAL, global_batch, num_active)
    assert state.up_rate == pytest.approx(up_rate, rel=0.05, abs=1e-12)
    assert state.not_active == pytest.approx(not_active, abs=0.02)


@pytest.mark.parametrize("num_wanting", range(11))
def test_equal_adapters_are_active_in_equal_shares(num_wanting: int) -> None:
    demand = SlotDemand(np.full(10, 0.1), 7.0, capacity=4)
    demand.at(4)
    state = demand.at(num_wanting)
    assert state.not_active == pytest.approx(1 - min(num_wanting, 4) / 10, abs=1e-6)
    assert state.up_rate == pytest.approx(0.7 * (10 - num_wanting), abs=1e-9)


def test_a_queue_slows_the_slots_down() -> None:
    """Requests that waited start together and keep the slot for longer: fewer adapters leave."""
    demand = SlotDemand(np.full(8, 0.125), 6.0, capacity=3)
    down_rates = [demand.at(num_wanting).down_rate for num_wanting in range(3, 9)]
    assert all(later < earlier for earlier, later in itertools.pairwise(down_rates))
    assert down_rates[0] < 3  # a busy period lasts longer than one service
