# SPDX-License-Identifier: Apache-2.0
"""Popularity that moves from adapter to adapter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bench.cache.conversations import Drifting
from moe_lora.workload.popularity.popularity import zipf

BASE = zipf([f"a{i}" for i in range(5)], 1.5)


def drifting_of(num_moves):
    return Drifting(BASE.adapters, BASE.probabilities, num_moves=num_moves)


def test_without_moves_it_is_its_base():
    assert drifting_of(0).at(0.7).probabilities == pytest.approx(BASE.probabilities)


def test_the_least_popular_becomes_the_most_popular_with_each_move():
    drifting = drifting_of(4)
    before = drifting.at(0.0).probabilities
    after = drifting.at(0.3).probabilities
    assert before == pytest.approx(BASE.probabilities)
    assert int(np.argmax(after)) == 4
    assert after[0] == pytest.approx(before[1])


def test_draws_follow_the_popularity_of_their_time():
    drifting = drifting_of(4)
    for share in (0.1, 0.6):
        drawn = Counter(drifting.draw(np.full(20_000, share), np.random.default_rng(0)))
        expected = dict(zip(drifting.adapters, drifting.at(share).probabilities, strict=True))
        for name, probability in expected.items():
            assert drawn[name] / 20_000 == pytest.approx(probability, abs=0.015)
