# SPDX-License-Identifier: Apache-2.0
"""What the estimator bench makes of its cells."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("moe_lora.provision.admission.iar")

from bench.provision import estimator_grid


def test_goals_count_the_cells_near_the_simulation_and_name_the_worst() -> None:
    cells = [
        {"simulated": 0.5, "paper": 0.8, "corrected": 0.51, "standard_error": 0.001, "corrected_s": 0.1},
        {"simulated": 0.9, "paper": 0.91, "corrected": 0.87, "standard_error": 0.002, "corrected_s": 0.3},
    ]
    paper, corrected, slowest = estimator_grid.goals(cells)
    assert "1 of 2 cells" in paper
    assert "worst 30.00 (standard error 0.10)" in paper
    assert "1 of 2 cells" in corrected
    assert "worst 3.00 (standard error 0.20)" in corrected
    assert "at most 0.30 s" in slowest


def test_a_row_covers_each_capacity_once_around_the_expected_active() -> None:
    row = estimator_grid.measure_row(np.full(8, 1 / 8), global_batch=8.0, quick=True)
    assert row["expected_active"] == pytest.approx(8 * (1 - np.exp(-1)))
    assert [cell["capacity"] for cell in row["cells"]] == [4, 5, 6, 7]
    for model in estimator_grid.MODELS:
        assert row["worst_error"][model] == max(abs(cell[model] - cell["simulated"]) for cell in row["cells"])
    assert row["worst_error"]["corrected"] < row["worst_error"]["paper"]


@pytest.mark.parametrize("shape", estimator_grid.SHAPES)
def test_shapes_are_popularities(shape: str) -> None:
    probabilities = estimator_grid.SHAPES[shape](64)
    assert probabilities.shape == (64,)
    assert (probabilities >= 0).all()
    assert probabilities.sum() == pytest.approx(1.0)
