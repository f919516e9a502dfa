"""Plans replayed in the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.provision.plan import make_plan
from moe_lora.provision.replayed import planned_requests, verify
from tests.provision.plans import inputs, zipf


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i * 0.05, "prompt_tokens": 300, "output_tokens": 20} for i in range(2000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_replays_surround_the_planned_capacity_at_both_speeds(trace: Path) -> None:
    given = inputs(output_tokens=20.0, rate_per_s=60.0, context_tokens=320.0, probabilities=zipf(128))
    plan = make_plan(given)
    found = verify(given, plan, trace)
    capacities = [one.replay.capacity for one in found if one.speed == "slo"]
    assert capacities == sorted(set(capacities))
    assert plan.capacity in capacities
    at_slo = next(one.replay for one in found if one.speed == "slo" and one.replay.capacity == plan.capacity)
    assert at_slo.mean_tpot_s == pytest.approx(0.1, rel=0.01)
    assert at_slo.admitted_at_once == pytest.approx(plan.iar_corrected, abs=0.06)
    predicted = [one.replay for one in found if one.speed == "predicted"]
    assert all(replay.mean_tpot_s is not None and replay.mean_tpot_s <= 0.1 for replay in predicted)
    assert predicted[0].admitted_at_once is not None
    assert predicted[0].admitted_at_once > at_slo.admitted_at_once  # fewer run at once


def test_requests_come_at_the_planned_rate(trace: Path) -> None:
    requests = planned_requests(inputs(output_tokens=20.0, rate_per_s=60.0), trace)
    assert len(requests) / requests[-1].arrival_s == pytest.approx(60, rel=0.05)


def test_command_shows_replays(trace: Path) -> None:
    words = ["provision", "--trace", str(trace), "--model", "DBRX", "--adapters", "16", "--verify"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert "Simulated, steps as predicted" in shown.output
    content = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert {one["speed"] for one in content["verified"]} == {"slo", "predicted"}
