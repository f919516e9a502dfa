# SPDX-License-Identifier: Apache-2.0
import sys

import pytest

from bench.harness.records import ROOT
from bench.house.house_speed import Checkout, Part, judged, measure
from bench.house.house_speed_child import ALIKE, LAYOUTS, named


@pytest.mark.parametrize("name", sorted(LAYOUTS["folders"] | ALIKE))
def test_what_is_timed_is_where_the_table_says(name):
    assert callable(named(name))


@pytest.mark.slow
def test_checkout_is_compared_with_itself_in_processes_of_their_own():
    here = Checkout(ROOT, sys.executable)
    found = measure("decisions", Part(1, 2, {"": 3}, "decision"), here, here)
    assert set(found) == {
        "routing, least outstanding",
        "routing, adapter affinity",
        "cache, match and update",
    }
    for times in found.values():
        assert {side: len(seconds) for side, seconds in times.items()} == {
            "before": 2,
            "after": 2,
            "again": 2,
        }


@pytest.mark.parametrize(
    ("after", "again", "limit", "no_slower"),
    [
        (1.02, 1.01, 1.03, True),
        (1.04, 1.01, 1.03, False),
        (1.04, 1.10, 1.0577, True),
        (0.9, 0.8, 1.1111, True),
    ],
)
def test_limit_is_the_tolerance_or_what_a_checkout_differs_from_itself(after, again, limit, no_slower):
    result = judged({"before": [1.0] * 3, "after": [after] * 3, "again": [again] * 3})
    assert result["limit"] == pytest.approx(limit, abs=1e-3)
    assert result["no_slower"] is no_slower


def test_demo_is_judged_without_a_second_run():
    result = judged({"before": [100.0], "after": [104.0]})
    assert result["no_slower"] is False
    assert result["limit"] == 1.03
