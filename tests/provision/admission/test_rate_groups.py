# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from scipy.special import gammainc

from moe_lora.provision.admission.iar import EXACT_UP_TO, group_rates


def probabilities(low_rate: float, high_rate: float, global_batch: float) -> np.ndarray:
    """5000 different ones, so that rates lie evenly in the logarithm between the two."""
    rates = np.exp(np.random.default_rng(3).uniform(np.log(low_rate), np.log(high_rate), 5000))
    return rates / global_batch


def test_equal_rates_become_one_group() -> None:
    groups = group_rates(np.array([0.25, 0.125, 0.25, 0.125, 0.25]), 8)
    assert list(groups.rates) == [1.0, 2.0]
    assert list(groups.counts) == [2.0, 3.0]
    assert list(groups.mass) == [0.25, 0.75]


def test_rates_too_small_to_matter_become_zero_and_keep_their_mass() -> None:
    groups = group_rates(np.array([0.5, 0.5 - 2e-20, 1e-20, 1e-20]), 2)
    assert groups.rates[-1] == 0.0
    assert groups.counts[-1] == 2.0
    assert groups.mass[-1] == pytest.approx(2e-20)
    assert groups.counts.sum() == 4


def test_few_different_rates_stay_as_they_are() -> None:
    p = np.linspace(1, 2, EXACT_UP_TO)
    assert np.array_equal(group_rates(p, 3.0).rates, p * 3.0)


@pytest.mark.parametrize(
    ("low_rate", "high_rate"), [(1e-9, 1e-6), (1e-5, 50.0), (0.9, 1.1), (0.999, 400.0), (9e3, 1.1e4)]
)
def test_sums_over_groups_equal_sums_over_adapters(low_rate: float, high_rate: float) -> None:
    p = probabilities(low_rate, high_rate, 7.0)
    rates, groups = p * 7.0, group_rates(p, 7.0)
    assert len(groups.rates) < len(rates) / 2
    assert groups.counts.sum() == pytest.approx(5000, rel=1e-12)
    assert groups.mass.sum() == pytest.approx(p.sum(), rel=1e-12)
    middle = np.median(rates)
    for tau in (0.0, 0.5, 2.0, middle, middle + 2 * middle**0.5):
        q, group_q = gammainc(tau + 1, rates), gammainc(tau + 1, groups.rates)
        scale = 5000 * q.max()
        assert groups.counts @ group_q == pytest.approx(q.sum(), abs=1e-11 * scale)
        assert groups.mass @ (1 - group_q) == pytest.approx(p @ (1 - q), abs=1e-11 * p.sum())
        for theta in (1e-3, 0.1, 1.0):
            logs, group_logs = (np.log(1 + x * np.expm1(1j * theta)) for x in (q, group_q))
            assert abs(logs.sum() - groups.counts @ group_logs) < 1e-11 * scale + 1e-13
