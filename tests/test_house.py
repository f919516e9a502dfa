# SPDX-License-Identifier: Apache-2.0
"""The house keeps its numbers: ratchets, floors and budgets in `house_limits.json`, the only place of limits.

`python -m bench.house.house --limits` prints the numbers beside the limits.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping

import pytest

from bench.house.house_trace import trace_requests
from bench.house.measures import COUNTS, MEASURES, ROOT, TRACE, Found, Limits, counts, trace_counts

LIMITS = Limits()


@pytest.fixture(scope="module")
def counted() -> Mapping[str, Found]:
    return counts()


def trace() -> Mapping[str, Found]:
    return trace_counts(
        trace_requests(ROOT, sys.executable, generate_code=False, kinds=("completion", "load"))
    )


@pytest.fixture(scope="module")
def traced() -> Mapping[str, Found]:
    """Beyond a limit: places in two traces.  On a busy machine a timer's function falls in many windows."""
    first = trace()
    if not any(LIMITS.problem(name, found) for name, found in first.items()):
        return first
    again = trace()
    both = {name: sorted({*found.places} & {*again[name].places}) for name, found in first.items()}
    return {name: Found(len(places), places) for name, places in both.items()}


@pytest.mark.parametrize("name", COUNTS)
def test_the_code_keeps_its_limits(name: str, counted: Mapping[str, Found]) -> None:
    problem = LIMITS.problem(name, counted[name])
    assert problem is None, problem


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TRACE)
def test_requests_keep_their_limits(name: str, traced: Mapping[str, Found]) -> None:
    problem = LIMITS.problem(name, traced[name])
    assert problem is None, problem


def test_each_measure_has_one_limit() -> None:
    stated = [name for held in LIMITS.content.values() for name in held]
    assert sorted(stated) == sorted(MEASURES)


def test_each_raise_of_a_budget_states_its_reason() -> None:
    for name, budget in LIMITS.content["budgets"].items():
        for one in budget["raises"]:
            assert one["by"] > 0, name
            assert len(one["reason"].split()) >= 4, name


def test_ruff_still_checks_as_much() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    stated = {
        name: ast.literal_eval(value) for name, value in re.findall(r"^([\w-]+) = (.+)$", text, re.MULTILINE)
    }
    assert stated["line-length"] == 110
    assert stated["exclude"] == [".git", ".venv", ".cache", "build"]
    assert {"E", "F", "W", "I", "B", "UP", "C4", "SIM", "RUF", "PT", "RET"} <= set(stated["select"])
    assert set(stated["ignore"]) <= {"RUF001", "RUF002", "RUF003", "SIM108", "RET505", "PT011", "B028"}
    assert "per-file-ignores" not in text
