# SPDX-License-Identifier: Apache-2.0
"""Mean busy periods against the recursion they come from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.special import gammaln
from scipy.stats import nbinom

from moe_lora.provision.admission.corrected import LARGEST_RATE, BusyPeriods

RATES = np.array([1e-6, 0.1, 1.0, 5.0, 20.0])


def busy_periods_from(num_requests: np.ndarray, rate: float) -> np.ndarray:
    """Sums of the mean times from j to j - 1 requests in service, each the series of its first steps."""
    j, m = np.arange(1, num_requests.max() + 1)[:, None], np.arange(150)
    steps = np.exp(m * np.log(rate) + gammaln(j) - gammaln(j + m + 1)).sum(axis=1)
    return np.cumsum(steps)[num_requests - 1]


def test_from_one_request_it_is_the_known_formula() -> None:
    assert BusyPeriods(RATES).without_wait == pytest.approx(np.expm1(RATES) / RATES, rel=1e-12)


def test_above_the_largest_rate_it_is_as_at_that() -> None:
    periods = BusyPeriods(np.array([LARGEST_RATE, 1e6])).without_wait
    assert periods[0] == periods[1]
    assert np.isfinite(periods).all()


@pytest.mark.parametrize(("length", "speed"), [(1, 0.5), (1, 100.0), (3, 0.05), (40, 20.0)])
def test_after_a_queue_it_averages_over_the_requests_that_came_meanwhile(length: int, speed: float) -> None:
    """A Poisson process over an Erlang time counts a negative binomial number of requests."""
    found = BusyPeriods(RATES).after_queue(length, np.full(len(RATES), speed))
    for rate, value in zip(RATES[:-1], found[:-1], strict=True):
        counts = np.arange(6000)
        weights = nbinom.pmf(counts, length, speed / (speed + rate))
        assert weights.sum() == pytest.approx(1.0, abs=1e-9)
        assert value == pytest.approx(weights @ busy_periods_from(counts + 1, rate), rel=1e-6)


def test_a_longer_queue_makes_longer_busy_periods() -> None:
    periods = BusyPeriods(RATES)
    by_length = [periods.after_queue(length, np.full(len(RATES), 2.0)) for length in (0, 1, 2, 10, 1000)]
    assert by_length[0] == pytest.approx(periods.without_wait)
    assert all((later > earlier).all() for earlier, later in itertools.pairwise(by_length))
