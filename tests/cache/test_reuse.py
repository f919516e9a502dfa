# SPDX-License-Identifier: Apache-2.0
"""What the cache counts of its nodes' reuse."""

from __future__ import annotations

import numpy as np
import pytest

from moe_lora.cache.columns import ReuseAges, _bin
from moe_lora.policies.caching.caching import EDGES_S, NUM_BINS, bins_of, classes_of, rates_from

NOBODY = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0)


@pytest.mark.parametrize("age_s", [0.0, 0.05, 0.11, 1.0, 17.3, 1e3, 1e9])
def test_quick_bin_is_the_bin(age_s):
    assert _bin(age_s) == bins_of(np.array([age_s]))[0]
    assert len(EDGES_S) + 1 == NUM_BINS


def test_rates_are_those_of_the_intervals_noted():
    """Two nodes used after 10 s, one removed after 20 s: three were 0 to 10 s old, one 10 to 20."""
    ages = ReuseAges()
    for age_s, visited in ((10.0, True), (10.0, True), (20.0, False)):
        ages.note(1.0, 100, age_s, visited=visited)
    ages.refresh(0.0, *NOBODY)
    place = classes_of(np.array([1.0]), np.array([100]))[0]
    grid = np.linspace(0.0, 20.0, 200_001)
    alive = np.where(grid < 10.0, 3, 1)
    time_s, hits = np.zeros(ages.rates.per_s.shape), np.zeros(ages.rates.per_s.shape)
    np.add.at(time_s[place], bins_of(grid), alive * (grid[1] - grid[0]))
    hits[place, bins_of(np.array([10.0]))] = 2
    assert ages.rates.per_s == pytest.approx(rates_from(hits, time_s).per_s, rel=1e-3)


def test_nodes_that_are_there_count_up_to_their_age():
    alone, crowded = ReuseAges(), ReuseAges()
    for ages in (alone, crowded):
        ages.note(1.0, 100, 5.0, visited=True)
    alone.refresh(0.0, *NOBODY)
    crowded.refresh(0.0, np.ones(50), np.full(50, 100), np.full(50, 60.0))
    young = int(bins_of(np.array([1.0]))[0])
    place = classes_of(np.array([1.0]), np.array([100]))[0]
    assert crowded.rates.per_s[place, young] < alone.rates.per_s[place, young] / 3


def test_old_counts_fade():
    ages = ReuseAges()
    for _ in range(1000):
        ages.note(1.0, 100, 60.0, visited=False)
    ages.refresh(0.0, *NOBODY)
    place = classes_of(np.array([1.0]), np.array([100]))[0]
    known = ages.rates.per_s[place, 0]
    ages.refresh(1e5, *NOBODY)
    assert ages.rates.per_s[place, 0] > 10 * known


def test_rates_are_computed_anew_after_a_second():
    ages = ReuseAges()
    assert ages.is_due(0.0)
    ages.refresh(0.0, *NOBODY)
    assert not ages.is_due(0.5)
    assert ages.is_due(1.5)
