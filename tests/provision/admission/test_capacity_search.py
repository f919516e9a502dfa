# SPDX-License-Identifier: Apache-2.0
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.provision.admission.iar import AdmissibilityModel, least_turned_away, smallest_capacity

from .popularities import global_batches, popularities, two_levels, zipf


class CountingModel(AdmissibilityModel):
    """Remembers at which capacities the rate was asked for."""

    def __init__(self, probabilities: np.ndarray, global_batch: float) -> None:
        super().__init__(probabilities, global_batch)
        self.asked: list[int] = []

    def rate(self, capacity: int) -> float:
        self.asked.append(capacity)
        return super().rate(capacity)


@hypothesis.settings(max_examples=100, deadline=None)
@given(popularities(80), global_batches, st.data())
def test_bound_holds_for_every_capacity_of_the_stretch(p, global_batch, data) -> None:
    model = AdmissibilityModel(p, global_batch)
    top = math.ceil(model.expected_active) - 1
    hypothesis.assume(top >= 1)
    begin = data.draw(st.integers(1, top))
    end = data.draw(st.integers(begin, top))
    bound = least_turned_away(model, begin, end)
    assert bound <= min(1 - model.rate(capacity) for capacity in range(begin, end + 1)) + 1e-11


def test_bound_of_one_capacity_is_its_own_value() -> None:
    model = AdmissibilityModel(zipf(200, 1.0), 400)
    assert least_turned_away(model, 60, 60) == pytest.approx(1 - model.rate(60), abs=1e-12)


@pytest.mark.parametrize("target", [0.74, 0.9, 0.97])
@pytest.mark.parametrize("global_batch", [200.0, 2000.0, 2e5])
def test_search_finds_what_a_scan_finds(target: float, global_batch: float) -> None:
    p = np.concatenate([two_levels(10, 0.7, 60) * 0.8, two_levels(25, 0.9, 300) * 0.2])
    model = AdmissibilityModel(p, global_batch)
    scan = next(m for m in range(1, len(p) + 1) if model.rate(m) >= target)
    assert smallest_capacity(model, target) == scan


@pytest.mark.parametrize("global_batch", [2e4, 4e5])
def test_search_tries_few_of_many_capacities(global_batch: float) -> None:
    model = CountingModel(zipf(50_000, 1.0), global_batch)
    found = smallest_capacity(model, 0.95)
    assert found > 5000
    assert len(model.asked) < 60
    assert model.rate(found) >= 0.95 > model.rate(found - 1)
