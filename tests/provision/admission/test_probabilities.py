# SPDX-License-Identifier: Apache-2.0
"""Checks of a popularity, a global batch and a capacity."""

from __future__ import annotations

import numpy as np
import pytest

from moe_lora.provision.admission.iar import checked_capacity, checked_global_batch, checked_probabilities


def test_a_sum_off_by_less_than_a_millionth_is_scaled_to_one() -> None:
    found = checked_probabilities([0.5, 0.5 + 4e-7])
    assert found.sum() == pytest.approx(1.0, abs=1e-15)
    with pytest.raises(ValueError, match="divide each value by the sum"):
        checked_probabilities([0.5, 0.5 + 4e-6])


def test_numpy_numbers_are_numbers() -> None:
    assert checked_capacity(np.int64(3)) == 3
    assert checked_global_batch(np.float32(2.0)) == 2.0


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_a_capacity_is_a_whole_number_from_one(value: object) -> None:
    with pytest.raises(ValueError, match="whole number of adapters"):
        checked_capacity(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "3", None])
def test_a_global_batch_is_finite_and_above_zero(value: object) -> None:
    with pytest.raises(ValueError, match="requests in service"):
        checked_global_batch(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[], [[1.0]], 1.0, [2.0, -1.0], [float("nan"), 1.0]])
def test_probabilities_are_a_list_of_finite_numbers_from_zero(value: object) -> None:
    with pytest.raises(ValueError, match=r"popularity(\[| has shape)"):
        checked_probabilities(value)  # type: ignore[arg-type]
