# SPDX-License-Identifier: Apache-2.0
"""Uses per second that keeping brings, from counts."""

from __future__ import annotations

import numpy as np
import pytest

from moe_lora.policies.caching.caching import (
    NOTHING_KNOWN,
    NUM_BINS,
    NUM_CLASSES,
    STARTS_S,
    bins_of,
    classes_of,
    rates_from,
)


def counts() -> np.ndarray:
    return np.zeros((NUM_CLASSES, NUM_BINS))


def test_without_knowledge_the_least_recently_used_is_worth_least():
    assert (np.diff(NOTHING_KNOWN.per_s, axis=1) < 0).all()


def test_use_after_a_pause_makes_the_middle_of_the_pause_worth_more_than_its_begin():
    """1000 nodes, all used again after 16 to 23 s."""
    hits, time_s = counts(), counts()
    used = int(bins_of(np.array([18.0]))[0])
    hits[0, used] = 1000
    time_s[0, :used] = 1000 * np.diff(STARTS_S)[:used]
    time_s[0, used] = 1000 * 2.0
    rates = rates_from(hits, time_s).per_s[0]
    assert (np.diff(rates[: used + 1]) > 0).all()
    assert rates[used + 1] < rates[0] < rates[used]
    assert rates[0] == pytest.approx(1001 / (1000 * (STARTS_S[used] + 2.0) + STARTS_S[used + 1]), rel=1e-6)


def test_what_is_never_used_again_is_worth_less_the_more_is_known_of_it():
    hits, little, much = counts(), counts(), counts()
    little[0] = 10.0
    much[0] = 1000.0
    assert (rates_from(hits, much).per_s[0] < rates_from(hits, little).per_s[0]).all()


def test_classes_tell_adapters_uses_and_depth_apart():
    uses = np.array([1.0, 1.0, 1.0, 4.0, 4.0, 1e9])
    depth = np.array([0, 32, 2000, 2000, 0, 10**6])
    classes = classes_of(uses, depth)
    assert len(set(classes.tolist())) == 6
    assert classes.max() < NUM_CLASSES
