# SPDX-License-Identifier: Apache-2.0
"""Degenerate and bad input to the admissibility functions."""

import numpy as np
import pytest

from moe_lora.provision.admission.iar import expected_active, immediate_admissibility_rate, min_capacity

from .popularities import residency, two_levels, zipf


def test_one_adapter_always_fits() -> None:
    assert immediate_admissibility_rate([1.0], 5, 1) == 1.0
    assert min_capacity([1.0], 5, 1.0) == 1


def test_adapters_that_nobody_asks_for_need_no_place() -> None:
    with_zeros = [0.5, 0.0, 0.3, 0.0, 0.2]
    for capacity in (1, 2, 3, 4):
        assert immediate_admissibility_rate(with_zeros, 7, capacity) == pytest.approx(
            immediate_admissibility_rate([0.5, 0.3, 0.2], 7, capacity), abs=1e-15
        )
    assert min_capacity(with_zeros, 7, 1.0) == 3
    assert list(residency(np.asarray(with_zeros), 7, 2)[1][[1, 3]]) == [0.0, 0.0]


def test_all_mass_on_one_adapter() -> None:
    assert immediate_admissibility_rate([0.0, 1.0, 0.0], 100, 1) == 1.0
    assert min_capacity([0.0, 1.0, 0.0], 100, 0.99) == 1


@pytest.mark.parametrize("global_batch", [1e-300, 1e-3, 1.0, 1e3, 1e9])
def test_only_a_place_for_each_used_adapter_reaches_1(global_batch: float) -> None:
    p = zipf(40, 1.2)
    assert min_capacity(p, global_batch, 1.0) == 40
    assert immediate_admissibility_rate(p, global_batch, 39) < 1.0
    assert immediate_admissibility_rate(p, global_batch, 40) == 1.0
    assert immediate_admissibility_rate(p, global_batch, 10**12) == 1.0


def test_a_batch_that_hardly_ever_has_two_requests_needs_one_place() -> None:
    assert immediate_admissibility_rate(zipf(100, 1.0), 1e-4, 1) == pytest.approx(1.0, abs=1.1e-4)
    assert min_capacity(zipf(100, 1.0), 1e-4, 0.999) == 1


def test_with_a_huge_batch_the_most_popular_are_resident_and_the_rest_is_turned_away_when_full() -> None:
    p = two_levels(num_hot=10, hot_mass=0.9, num_cold=90)
    tau, q = residency(p, 1e9, 10)
    assert 0.1e9 / 90 < tau < 0.9e9 / 10
    assert q == pytest.approx([1.0] * 10 + [0.0] * 90, abs=1e-12)
    assert immediate_admissibility_rate(p, 1e9, 10) == pytest.approx(0.9, abs=1e-9)


def test_capacity_above_the_number_of_adapters_means_that_each_has_a_place() -> None:
    tau, q = residency(np.array([0.5, 0.5]), 4, 7)
    assert tau == 0.0
    assert q == pytest.approx([1 - np.exp(-2)] * 2)


def test_a_sum_that_is_off_by_rounding_is_scaled() -> None:
    p = zipf(50, 1.0)
    rate = immediate_admissibility_rate(p, 25, 10)
    assert immediate_admissibility_rate(p * (1 + 5e-7), 25, 10) == pytest.approx(rate, abs=1e-12)
    assert expected_active(p * (1 + 5e-7), 25) == pytest.approx(expected_active(p, 25), rel=1e-12)


def test_single_precision_popularity_is_taken() -> None:
    p = zipf(50, 1.0)
    assert min_capacity(p.astype(np.float32), 25, 0.9) == min_capacity(p, 25, 0.9)


@pytest.mark.parametrize(
    ("popularity", "message"),
    [
        ([0.5, -0.5, 1.0], r"popularity\[1\]=-0.5 is not a probability; give finite numbers >= 0"),
        ([0.5, float("nan")], r"popularity\[1\]=nan is not a probability"),
        ([float("inf")], r"popularity\[0\]=inf is not a probability"),
        ([], r"shape \(0,\); give one probability per adapter"),
        ([[0.5, 0.5]], r"shape \(1, 2\); give one probability per adapter"),
        ([3, 1], r"sums to 4, not 1; divide each value by the sum of all"),
        ([0.0, 0.0], r"sums to 0, not 1"),
    ],
)
def test_bad_popularity_is_refused(popularity: list, message: str) -> None:
    for call in (
        lambda: immediate_admissibility_rate(popularity, 4, 1),
        lambda: min_capacity(popularity, 4, 0.9),
        lambda: expected_active(popularity, 4),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("global_batch", [0, -1.0, float("nan"), float("inf"), "4"])
def test_bad_global_batch_is_refused(global_batch) -> None:
    with pytest.raises(ValueError, match=r"global_batch=.* is not allowed; give requests in service, > 0"):
        min_capacity([1.0], global_batch, 0.9)
    with pytest.raises(ValueError, match="global_batch="):
        expected_active([1.0], global_batch)


@pytest.mark.parametrize("capacity", [0, -3, 1.5, True, "2"])
def test_bad_capacity_is_refused(capacity) -> None:
    with pytest.raises(ValueError, match=r"capacity=.* is not allowed; give a whole number of adapters"):
        immediate_admissibility_rate([0.5, 0.5], 4, capacity)


@pytest.mark.parametrize("target", [0, -0.1, 1.01, float("nan"), "0.9"])
def test_bad_target_is_refused(target) -> None:
    with pytest.raises(ValueError, match=r"target=.* is not allowed; choose an IAR above 0 and up to 1"):
        min_capacity([0.5, 0.5], 4, target)
