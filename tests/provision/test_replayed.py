"""Plans replayed in the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.provision.plan import make_plan
from moe_lora.provision.replayed import planned_requests, verify
from moe_lora.workload.traces import read_trace
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
    assert at_slo.mean_tpot_s is not None
    assert at_slo.mean_tpot_s >= 1.2 * plan.tpot_s * 0.99  # and the loading of adapters beside it
    # Answers of 20 quick steps: loading, which the plan's TPOT leaves out, is a large part of a request.
    assert at_slo.admitted_at_once is not None
    assert plan.iar_corrected - 0.2 <= at_slo.admitted_at_once <= plan.iar_corrected + 0.02
    predicted = [one.replay for one in found if one.speed == "predicted"]
    assert all(replay.mean_tpot_s is not None and replay.mean_tpot_s <= 0.1 for replay in predicted)
    planned = next(replay for replay in predicted if replay.capacity == plan.capacity)
    assert planned.admitted_at_once is not None
    assert planned.admitted_at_once > at_slo.admitted_at_once  # fewer run at once


def test_requests_come_at_the_planned_rate(trace: Path) -> None:
    given = inputs(output_tokens=20.0, rate_per_s=60.0)
    (requests,) = planned_requests(given, make_plan(given), read_trace(trace)).values()
    assert len(requests) / requests[-1].arrival_s == pytest.approx(60, rel=0.05)


def test_trace_that_comes_in_bursts_waits_where_its_poisson_twin_does_not(tmp_path: Path) -> None:
    path = tmp_path / "bursts.jsonl"
    names = np.random.default_rng(0).integers(40, size=3000).tolist()
    rows = [
        {"arrival_s": i // 120 * 6.0, "prompt_tokens": 300, "output_tokens": 20, "adapter": f"a{name}"}
        for i, name in enumerate(names)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    given = inputs(
        output_tokens=20.0,
        rate_per_s=20.0,
        context_tokens=320.0,
        probabilities=np.full(40, 1 / 40),
        trace_rate_per_s=20.0,
        adapters_are_traces=True,
        instances=1,
    )
    plan = make_plan(given)
    found = {
        one.arrivals: one.replay
        for one in verify(given, plan, path)
        if one.speed == "slo" and one.replay.capacity == plan.capacity
    }
    for replay in found.values():
        shares = replay.admitted_at_once, replay.waited_for_adapter, replay.waited_for_room
        assert sum(share or 0.0 for share in shares) == pytest.approx(1.0)
    at_once = {name: replay.admitted_at_once or 0.0 for name, replay in found.items()}
    assert at_once["poisson"] == pytest.approx(plan.iar_corrected, abs=0.1)
    assert at_once["trace"] < at_once["poisson"] - 0.1


def test_plan_for_the_peak_is_checked_by_the_traces_own_arrivals_too(trace: Path) -> None:
    given = inputs(output_tokens=20.0, rate_per_s=60.0, trace_rate_per_s=20.0)
    requests = planned_requests(given, make_plan(given), read_trace(trace))
    rates = {kind: len(planned) / planned[-1].arrival_s for kind, planned in requests.items()}
    assert rates == pytest.approx({"trace": 20.0, "poisson": 60.0}, rel=0.05)


def test_adapters_are_drawn_unless_the_plan_is_for_the_traces(tmp_path: Path) -> None:
    path = tmp_path / "named.jsonl"
    row = {"arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 2, "adapter": "named"}
    path.write_text("\n".join(json.dumps(row | {"arrival_s": float(i)}) for i in range(50)))
    for traces, names in ((True, {"named"}), (False, {"0", "1"})):
        given = inputs(probabilities=np.array([0.5, 0.5]), adapters_are_traces=traces)
        (requests,) = planned_requests(given, make_plan(given), read_trace(path)).values()
        assert {request.adapter for request in requests} == names


def test_command_shows_replays(trace: Path) -> None:
    words = ["provision", "--trace", str(trace), "--model", "DBRX", "--adapters", "16", "--verify"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert "Simulated, the trace's own arrivals, steps as predicted" in shown.output
    assert "waited for KV or batch" in shown.output
    content = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    for name, kinds in (("speed", {"slo", "predicted"}), ("arrivals", {"trace", "poisson"})):
        assert {one[name] for one in content["verified"]} == kinds
