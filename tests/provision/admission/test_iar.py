# SPDX-License-Identifier: Apache-2.0
import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.provision.provision_reference import (
    min_capacity_by_scan,
    rate_as_printed,
    rate_as_printed_vectorised,
    rate_by_convolution,
    rate_by_enumeration,
    residencies,
)
from moe_lora.provision.admission.iar import expected_active, immediate_admissibility_rate, min_capacity
from tests.grids import diagonal, with_quick

from .popularities import global_batches, popularities, residency, two_levels, zipf

targets = st.floats(0.01, 1.0)


def clear_of(target: float, rates: list[float]) -> bool:
    """Rounding decides nothing."""
    return target == 1 or min(abs(rate - target) for rate in rates) > 1e-10


@pytest.mark.parametrize(("capacity", "rate"), [(71, 0.882), (92, 0.973)])
def test_rates_of_the_zipf_example(capacity: int, rate: float) -> None:
    assert immediate_admissibility_rate(zipf(512, 1.2), 256, capacity) == pytest.approx(rate, abs=5e-4)


def test_a_quarter_of_the_zipf_adapters_serves_more_than_91_percent_at_any_batch_up_to_ten_million() -> None:
    rates = [
        immediate_admissibility_rate(zipf(512, 1.2), 10**power, 128) for power in np.arange(0, 7.01, 0.05)
    ]
    assert 0.91 < min(rates) < 0.92


def test_with_ever_larger_batches_the_rate_becomes_the_share_of_the_most_popular() -> None:
    p = zipf(512, 1.2)
    assert immediate_admissibility_rate(p, 1e10, 128) == pytest.approx(p[:128].sum(), abs=1e-9)


@hypothesis.settings(max_examples=40, deadline=None)
@given(popularities(8), global_batches, st.integers(1, 8))
def test_equals_enumeration_of_all_states(p: np.ndarray, global_batch: float, capacity: int) -> None:
    q = residencies(p, global_batch, capacity)
    expected = rate_by_enumeration(p, q, capacity)
    assert immediate_admissibility_rate(p, global_batch, capacity) == pytest.approx(expected, abs=1e-12)


def test_equals_enumeration_of_1024_states() -> None:
    for p in (zipf(10, 1.0), two_levels(4, 0.7, 6)):
        for capacity in range(1, 10):
            expected = rate_by_enumeration(p, residencies(p, 20, capacity), capacity)
            assert immediate_admissibility_rate(p, 20, capacity) == pytest.approx(expected, abs=1e-12)


@hypothesis.settings(max_examples=15, deadline=None)
@given(popularities(25), global_batches, st.integers(1, 25))
def test_equals_the_printed_dynamic_program(p: np.ndarray, global_batch: float, capacity: int) -> None:
    expected = rate_as_printed(p, residencies(p, global_batch, capacity), min(capacity, len(p)))
    assert immediate_admissibility_rate(p, global_batch, capacity) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("global_batch", with_quick([15.0, 60.0, 6000.0], [60.0]))
def test_equals_the_printed_dynamic_program_at_60_adapters(global_batch: float) -> None:
    p = zipf(60, 1.2)
    for capacity in (1, 7, 20, 45, 59):
        expected = rate_as_printed(p, residencies(p, global_batch, capacity), capacity)
        assert immediate_admissibility_rate(p, global_batch, capacity) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("p", [zipf(60, 1.2), zipf(48, 0.3), two_levels(9, 0.7, 51)])
@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_capacity_of_the_printed_algorithm(p: np.ndarray, target: float) -> None:
    assert min_capacity(p, 40, target) == min_capacity_by_scan(p, 40, target, rate_as_printed_vectorised)


def test_capacity_of_the_printed_algorithm_step_by_step() -> None:
    p = zipf(24, 1.2)
    assert min_capacity(p, 12, 0.95) == min_capacity_by_scan(p, 12, 0.95, rate_as_printed)


@pytest.mark.parametrize("target", [0.5, 0.95])
def test_capacity_of_the_printed_algorithm_at_200_adapters(target: float) -> None:
    p = zipf(200, 1.2)
    assert min_capacity(p, 100, target) == min_capacity_by_scan(p, 100, target, rate_as_printed_vectorised)


@pytest.mark.slow
@pytest.mark.parametrize("s", [0.6, 1.2])
def test_capacity_of_the_printed_algorithm_at_512_adapters(s: float) -> None:
    p = zipf(512, s)
    assert min_capacity(p, 256, 0.95) == min_capacity_by_scan(p, 256, 0.95, rate_as_printed_vectorised)


@pytest.mark.parametrize(
    ("global_batch", "shape"), diagonal((750.0, 3000.0, 3e5), ("zipf", "dirichlet", "near one rate"))
)
def test_many_adapters_stay_within_the_stated_error(shape: str, global_batch: float) -> None:
    rng = np.random.default_rng(5)
    weights = {
        "zipf": zipf(3000, 1.2),
        "dirichlet": rng.dirichlet(np.full(3000, 0.3)),
        "near one rate": rng.uniform(0.98, 1.02, 3000),
    }[shape]
    p = weights / weights.sum()
    active = expected_active(p, global_batch)
    for capacity in {max(1, int(active * share)) for share in (0.01, 0.5, 0.98, 1.0, 1.02)}:
        expected = rate_by_convolution(p, residencies(p, global_batch, capacity), min(capacity, 3000))
        found = immediate_admissibility_rate(p, global_batch, capacity)
        assert found == pytest.approx(expected, abs=1e-10)


@hypothesis.settings(max_examples=60, deadline=None)
@given(popularities(60), global_batches, targets)
def test_capacity_is_the_first_that_reaches_the_target(
    p: np.ndarray, global_batch: float, target: float
) -> None:
    rates = [immediate_admissibility_rate(p, global_batch, m) for m in range(1, len(p) + 1)]
    hypothesis.assume(clear_of(target, rates))
    found = min_capacity(p, global_batch, target)
    assert rates[found - 1] >= target
    assert all(rate < target for rate in rates[: found - 1])


@hypothesis.settings(max_examples=60, deadline=None)
@given(popularities(60), global_batches)
def test_rate_grows_with_the_capacity_once_all_active_adapters_fit(
    p: np.ndarray, global_batch: float
) -> None:
    first = max(1, int(np.ceil(expected_active(p, global_batch))))
    rates = [immediate_admissibility_rate(p, global_batch, m) for m in range(first, len(p) + 2)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert np.all(np.diff(rates) >= -1e-12)
    assert rates[-1] == 1.0


@pytest.mark.parametrize(("s", "global_batch"), diagonal((0.0, 0.6, 1.0, 1.2, 1.5), (64, 512, 4096)))
def test_rate_grows_with_the_capacity_under_zipf(s: float, global_batch: float) -> None:
    rates = [immediate_admissibility_rate(zipf(256, s), global_batch, m) for m in range(1, 257)]
    assert np.all(np.diff(rates) > -1e-12)


def test_rate_can_fall_where_hot_adapters_fit_exactly() -> None:
    # With 9 places one hot adapter is often out and a place is free for a cold one; with 10 none is.
    p = two_levels(num_hot=10, hot_mass=0.7, num_cold=1000)
    assert immediate_admissibility_rate(p, 1000, 9) > immediate_admissibility_rate(p, 1000, 10) + 0.03
    assert rate_by_convolution(p, residencies(p, 1000, 9), 9) > 0.75
    assert rate_by_convolution(p, residencies(p, 1000, 10), 10) < 0.71
    assert min_capacity(p, 1000, 0.745) == 9
    assert min_capacity(p, 1000, 0.76) == 11


@hypothesis.settings(max_examples=40, deadline=None)
@given(popularities(40), global_batches, targets, st.randoms(use_true_random=False))
def test_order_of_the_adapters_does_not_matter(p, global_batch, target, random) -> None:
    shuffled = p[random.sample(range(len(p)), len(p))]
    rates, after = (
        [immediate_admissibility_rate(order, global_batch, m) for m in range(1, len(p) + 1)]
        for order in (p, shuffled)
    )
    assert after == pytest.approx(rates, abs=1e-12)
    hypothesis.assume(clear_of(target, rates))
    assert min_capacity(shuffled, global_batch, target) == min_capacity(p, global_batch, target)


def test_residents_fill_the_capacity_while_more_are_active() -> None:
    tau, q = residency(zipf(512, 1.2), 256, 71)
    assert tau > 0
    assert q.sum() == pytest.approx(71, rel=1e-12)
    assert np.all(np.diff(q) < 0)


def test_threshold_is_zero_when_all_active_adapters_fit() -> None:
    p = zipf(512, 1.2)
    tau, q = residency(p, 256, 92)
    assert tau == 0
    assert q.sum() == pytest.approx(expected_active(p, 256), rel=1e-12)
    assert q == pytest.approx(-np.expm1(-256 * p), rel=1e-12)
