# SPDX-License-Identifier: Apache-2.0
"""Arrival processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.workload.replay_plan import (
    cut_duration,
    gamma_arrivals,
    gamma_arrivals_until,
    original_arrivals,
)

rates = st.floats(0.01, 1e4)
bursts = st.floats(0.05, 50)
seeds = st.integers(0, 2**32 - 1)


@given(rate=rates, burstiness=bursts, num_requests=st.integers(0, 300), seed=seeds)
def test_drawn_arrivals_are_sorted_and_as_many_as_asked(
    rate: float, burstiness: float, num_requests: int, seed: int
) -> None:
    times = gamma_arrivals(num_requests, rate, burstiness, np.random.default_rng(seed))
    assert len(times) == num_requests
    assert np.all(np.diff(times) >= 0)
    assert np.all(times >= 0)


@pytest.mark.parametrize("burstiness", [0.1, 0.5, 1.0, 4.0])
def test_drawn_arrivals_have_the_rate_and_variation_asked_for(burstiness: float) -> None:
    gaps = np.diff(gamma_arrivals(40_000, 7.0, burstiness, np.random.default_rng(1)))
    assert 1 / gaps.mean() == pytest.approx(7.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@given(
    gaps=st.lists(st.floats(0, 100), min_size=1, max_size=50).filter(lambda gaps: sum(gaps) > 1e-6),
    rate=rates,
)
def test_scaled_arrivals_have_the_rate_and_keep_the_proportions(gaps: list[float], rate: float) -> None:
    recorded = np.cumsum([3.0, *gaps])
    times = original_arrivals(recorded, rate)
    assert times[0] == 0
    assert len(gaps) / times[-1] == pytest.approx(rate, rel=1e-6)
    assert np.allclose(times / times[-1], (recorded - recorded[0]) / (recorded[-1] - recorded[0]))


def test_recorded_arrivals_are_kept_without_a_rate() -> None:
    assert original_arrivals([2.0, 2.5, 7.0]).tolist() == [0.0, 0.5, 5.0]


def test_trace_of_one_moment_cannot_be_scaled() -> None:
    with pytest.raises(ValueError, match="all arrive at once"):
        original_arrivals([1.0, 1.0], 5.0)


@given(duration_s=st.floats(0.1, 50), burstiness=bursts, seed=seeds)
def test_arrivals_until_fill_the_duration_and_do_not_pass_it(
    duration_s: float, burstiness: float, seed: int
) -> None:
    times = gamma_arrivals_until(duration_s, 5.0, burstiness, np.random.default_rng(seed))
    assert np.all(times < duration_s)
    longer = gamma_arrivals_until(duration_s * 2, 5.0, burstiness, np.random.default_rng(seed))
    assert np.all(np.diff(longer) >= 0)


def test_duration_cuts() -> None:
    assert cut_duration(np.array([0.0, 1.0, 2.0]), 2.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_impossible_settings_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="> 0"):
        gamma_arrivals(3, rate, burstiness, np.random.default_rng(0))
