# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from bench.provision import provision_reference as reference
from bench.provision.provision_solver import (
    against_printed,
    exponents,
    goals,
    largest_error,
    popularity,
    solve_alone,
)


def test_three_references_agree() -> None:
    p = popularity("dirichlet 0.3", 9)
    q = reference.residencies(p, 12.0, 4)
    expected = reference.rate_by_enumeration(p, q, 4)
    for rate in (
        reference.rate_as_printed,
        reference.rate_as_printed_vectorised,
        reference.rate_by_convolution,
    ):
        assert rate(p, q, 4) == pytest.approx(expected, abs=1e-13)


def test_solution_is_recorded_with_time_and_memory() -> None:
    result = solve_alone("zipf 1.2", 64, 32.0, rounds=2)
    assert result["iar"] >= 0.95
    assert len(result["seconds"]) == 2
    assert result["peak_bytes"] >= result["peak_bytes_before"] > 0


def test_printed_algorithm_takes_turns_and_agrees() -> None:
    result = against_printed("zipf 1.2", 20, rounds=2)
    assert result["capacity"]["ours"] == result["capacity"]["printed"]
    assert result["speedup"]["num_pairs"] == 2


def test_error_is_that_of_the_worst_capacity() -> None:
    result = largest_error("zipf 1.2", 300)
    assert result["largest"] == max(result["errors"].values()) < 1e-11


def test_exponent_of_times_that_grow_with_the_square_root() -> None:
    cells = [(name, share) for name in ("zipf 1.2", "dirichlet 0.3") for share in (0.5, 1.0)]
    alone = {(*cell, size): {"median_s": size**0.5} for cell in cells for size in (100, 10_000, 1_000_000)}
    records: list[dict] = []
    exponents(alone, lambda config, result: records.append(result))
    assert records[0] == pytest.approx({"all": 0.5, "from_10000": 0.5})


def test_goals_say_what_was_missed() -> None:
    slow = {"first_s": 6.0, "seconds": [4.0], "peak_bytes": 3 * 10**8}
    pair = {"capacity": {"ours": 90, "printed": 90}, "speedup": {"median": 2000.0}}
    lines = goals({("zipf 1.2", 0.5, 1_000_000): slow}, {("zipf 1.2", 512): pair})
    assert [line.rpartition(" ")[2] for line in lines] == ["MISSED", "met", "met", "met"]
