# SPDX-License-Identifier: Apache-2.0
"""The table of plans: what is committed is what the planner says today, and docs quote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.provision.plan_cases import CASES
from bench.provision.plan_table import planned, qwen_rates, row
from moe_lora.provision.plan.memory import KNOWN_MODELS
from moe_lora.report.results import read_results
from tests.grids import with_quick

ROOT = Path(__file__).parents[2]
COMMITTED = list(read_results(ROOT / "bench" / "results" / "provision_plans.jsonl"))


def test_every_model_of_table_3_has_a_plan_that_fits() -> None:
    fitting = {
        record["config"]["model"]
        for record in COMMITTED
        if "model" in record["config"] and "error" not in record["result"]["paper"]
    }
    assert fitting == {known.name for known in KNOWN_MODELS}


QUICK = (0, 5, 11)


@pytest.mark.parametrize("index", with_quick(range(len(CASES)), QUICK))
def test_committed_plans_are_what_the_planner_says(index: int) -> None:
    committed, found = COMMITTED[index]["result"]["paper"], planned(CASES[index], "paper")
    assert found.keys() >= committed.keys()
    for name in ("capacity", "layout", "instances", "lora_server_gpus", "binding_constraint"):
        assert found.get(name) == committed.get(name)
    assert found.get("iar_corrected") == pytest.approx(committed.get("iar_corrected"), abs=0.02)


def test_docs_hold_the_committed_rows() -> None:
    text = (ROOT / "docs" / "results" / "plans.md").read_text(encoding="utf-8")
    for case, record in zip(CASES, COMMITTED, strict=False):
        assert row(case, record["result"]) in text


def test_stated_inputs_never_come_down_to_the_papers_83_percent() -> None:
    stated = next(iter(qwen_rates()["ours"].values()))
    assert stated["128"]["paper"] > 0.91
