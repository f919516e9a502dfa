# SPDX-License-Identifier: Apache-2.0
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.provision.admission.iar import largest_probability, largest_step, overflow

chances = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))


def exact_pmf(q: list[float]) -> list[Fraction]:
    """Of the number of successes, without rounding."""
    pmf = [Fraction(1)]
    for chance in map(Fraction, q):
        pmf = [
            (1 - chance) * here + chance * before
            for here, before in zip([*pmf, Fraction(0)], [Fraction(0), *pmf], strict=True)
        ]
    return pmf


def exact_overflow(q: list[float], mass: list[float], capacity: int) -> tuple[float, float]:
    turned_away = sum(
        Fraction(mass[i]) * (1 - Fraction(q[i])) * sum(exact_pmf(q[:i] + q[i + 1 :])[capacity:])
        for i in range(len(q))
    )
    return float(turned_away), float(sum(exact_pmf(q)[capacity:]))


@hypothesis.settings(max_examples=80, deadline=None)
@given(st.lists(chances, min_size=1, max_size=9), st.integers(0, 10))
def test_equals_exact_fractions(q: list[float], capacity: int) -> None:
    mass = np.arange(1.0, len(q) + 1)
    mass /= mass.sum()
    found = overflow(np.array(q), np.ones(len(q)), mass, capacity)
    assert found == pytest.approx(exact_overflow(q, list(mass), capacity), abs=2e-14)


def test_a_group_counts_as_often_as_it_has_members() -> None:
    q, counts = np.array([0.3, 0.9]), np.array([4, 3])
    single = overflow(np.repeat(q, counts), np.ones(7), np.full(7, 1 / 7), 4)
    assert overflow(q, counts, counts / 7, 4) == pytest.approx(single, abs=1e-14)


@pytest.mark.parametrize("chance", [1e-4, 0.3, 0.5, 0.97])
def test_large_sums_equal_the_binomial(chance: float) -> None:
    from scipy.stats import binom

    count = 10**6
    middle, spread = count * chance, (count * chance * (1 - chance)) ** 0.5
    for capacity in (int(middle + z * spread) for z in (-3, 0, 2, 5)):
        found = overflow(np.array([chance]), np.array([count]), np.array([1.0]), capacity)
        without_one = (1 - chance) * binom.sf(capacity - 1, count - 1, chance)
        assert found.turned_away == pytest.approx(without_one, abs=1e-11)
        assert found.full == pytest.approx(binom.sf(capacity - 1, count, chance), abs=1e-11)


@hypothesis.settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_bounds_of_a_probability_and_of_a_step_hold(q: list[float]) -> None:
    pmf = np.array([1.0])
    for chance in q:
        pmf = np.convolve(pmf, [1 - chance, chance])
    variance = sum(chance * (1 - chance) for chance in q)
    assert pmf.max() <= largest_probability(variance) + 1e-12
    assert np.abs(np.diff(pmf, prepend=0, append=0)).max() <= largest_step(variance) + 1e-12


def test_bounds_are_near_what_a_fair_binomial_has() -> None:
    pmf = np.array([1.0])
    for _ in range(400):
        pmf = np.convolve(pmf, [0.5, 0.5])
    assert largest_probability(100.0) == pytest.approx(pmf.max(), rel=0.01)
    assert largest_step(100.0) < 1.5 * np.abs(np.diff(pmf)).max()
