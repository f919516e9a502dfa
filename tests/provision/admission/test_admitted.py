# SPDX-License-Identifier: Apache-2.0
"""The smallest capacity by either estimator."""

from __future__ import annotations

import numpy as np
import pytest

from moe_lora.provision.admission.admitted import ADMITTED, smallest_capacity_of
from tests.grids import diagonal
from tests.provision.plan.plans import zipf

POPULARITIES = {
    "zipf": zipf(16, 1.2),
    "uniform": np.full(16, 1 / 16),
    "one hot": np.array([0.7] + [0.3 / 15] * 15),
    "unused": np.array([0.5, 0.5, 0.0, 0.0]),
    "single": np.array([1.0]),
}


@pytest.mark.parametrize("estimator", ADMITTED)
@pytest.mark.parametrize(("name", "global_batch"), diagonal([*POPULARITIES], [0.5, 20.0, 400.0]))
def test_it_is_the_first_capacity_that_reaches_the_target(
    estimator: str, name: str, global_batch: float
) -> None:
    popularity = POPULARITIES[name]
    rates = [ADMITTED[estimator](popularity, global_batch, m) for m in range(1, len(popularity) + 1)]
    for target in (0.01, 0.6, 0.95, 0.999, 1.0):
        expected = next(m for m, rate in enumerate(rates, start=1) if rate >= target)
        assert smallest_capacity_of(estimator, popularity, global_batch, target) == expected
