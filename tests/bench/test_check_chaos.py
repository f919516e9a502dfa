# SPDX-License-Identifier: Apache-2.0
"""What the command makes of a round; rounds themselves are run by tests/dist/test_chaos.py."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.cluster import check_chaos
from moe_lora.report.results import read_results
from tests.dist.chaos import (
    FAULTS,
    HOLDER_FAULTS,
    HOST_FAULTS,
    OPERATOR_FAULTS,
    PAUSED_FAULTS,
    TOLD_FAULTS,
    ChaosPlan,
    ChaosReport,
)
from tests.dist.chaos_faults import Strike


@pytest.fixture
def plans(monkeypatch) -> list[ChaosPlan]:
    """The plans that were carried out: all is well, but for a wrong answer where the seed is 1."""
    plans = []

    def run(model, questions, folder, plan):
        plans.append(plan)
        return ChaosReport(
            strikes=[Strike("controller killed", ("controller",), 12.0, 30, 13.0, 17.5)],
            began_s=10.0,
            num_asked=40,
            counts=Counter(answered=38, refused=2),
            fetches={"peer": 5, "disk": 1},
            complaints=["request 7 for a: [1] is not [2]"] if plan.seed == 1 else [],
        )

    monkeypatch.setattr(check_chaos, "run_chaos", run)
    monkeypatch.setattr(check_chaos, "make_chaos_model", lambda folder: None)
    monkeypatch.setattr(check_chaos, "ask_undisturbed", lambda model, seed: {})
    return plans


def test_a_round_is_recorded_and_told(plans, tmp_path, capsys):
    out = tmp_path / "chaos.jsonl"
    options = ["--out", str(out), "--rounds", "1", "--requests", "40", "--parts", "none", "pool-2"]
    assert check_chaos.main([*options, "--in-namespace"]) == 0
    everywhere = (*FAULTS, *TOLD_FAULTS, *PAUSED_FAULTS, *OPERATOR_FAULTS, *HOST_FAULTS)
    assert [plan.pool_replicas for plan in plans] == [None, 2]
    assert sorted(plans[0].faults) == sorted(everywhere)
    assert sorted(plans[1].faults) == sorted((*everywhere, *HOLDER_FAULTS))
    first, second = read_results(out)
    assert (first["config"]["part"], second["config"]["part"]) == ("none", "pool-2")
    assert (first["result"]["answered"], first["result"]["refused"], first["result"]["cut"]) == (38, 2, 0)
    assert first["result"]["strikes"][0]["after_s"] == 2.0
    assert first["result"]["strikes"][0]["whole_after_s"] == 4.5
    told = capsys.readouterr().out.replace("\n", " ")
    assert "2.0 s, after    30 requests: controller killed (controller)" in told


def test_orders_of_faults_differ_from_round_to_round_and_are_the_seeds(plans, tmp_path):
    options = ["--out", str(tmp_path / "chaos.jsonl"), "--rounds", "2", "--parts", "EP2-PP1"]
    for _ in range(2):
        check_chaos.main([*options, "--in-namespace"])
    first, second, *again = [plan.faults for plan in plans]
    assert first != second
    assert [first, second] == again
    assert {plan.lora_server for plan in plans} == {"EP2-PP1"}


def test_without_namespaces_what_a_host_lacks_is_left_out_and_that_is_said(
    plans, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(check_chaos, "has_namespaces", lambda: False)
    check_chaos.main(["--out", str(tmp_path / "chaos.jsonl"), "--rounds", "1", "--parts", "none"])
    assert not set(plans[0].faults) & set(HOST_FAULTS)
    assert "what a host lacks is left out" in capsys.readouterr().out


def test_a_wrong_answer_fails_the_command(plans, tmp_path, capsys):
    out = tmp_path / "chaos.jsonl"
    assert check_chaos.main(["--out", str(out), "--rounds", "2", "--parts", "none", "--in-namespace"]) == 1
    assert [plan.seed for plan in plans] == [0, 1]
    assert [bool(record["result"]["complaints"]) for record in read_results(out)] == [False, True]
    assert "WRONG: request 7 for a" in capsys.readouterr().out
