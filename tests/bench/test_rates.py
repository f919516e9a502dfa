# SPDX-License-Identifier: Apache-2.0
"""bench_rates: its search, its requests, and a record of each system."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.lora_server import bench_rates
from bench.lora_server.bench_rates import MOST, STEP, best, highest, main, planned
from bench.lora_server.rate_systems import Setting, Systems
from moe_lora.report.results import read_results
from moe_lora.workload.traces.traces import read_trace

TRACE = Path(__file__).resolve().parents[2] / "demo" / "trace.csv"


@pytest.mark.parametrize("limit", [-1, 0, 1, 41, 79, 80, 81, 83, 120, MOST - 1])
@pytest.mark.parametrize("guess", [0, 80, 100])
def test_the_highest_power_is_met_and_the_next_is_not(limit, guess):
    asked = []

    def is_met(power):
        assert 0 <= power < MOST
        asked.append(power)
        return power <= limit

    assert highest(is_met, guess) == limit
    assert len(asked) == len(set(asked)) < 20


def test_the_best_setting_is_the_one_that_holds_the_next_power():
    limits = {one: Setting(num_instances=one, slots=1, router="") for one in (50, 90, 70, 91)}
    found = best(list(limits.values()), lambda setting, power: power <= setting.num_instances, 80)
    assert found == (limits[91], 91)


@pytest.mark.parametrize("arrivals", ["poisson", "trace"])
def test_requests_come_at_the_rate_and_differ_by_seed(arrivals):
    trace = read_trace(TRACE)
    systems = Systems("DBRX", trace)
    first, second = (planned(trace, systems, arrivals, seed, 40) for seed in (0, 1))
    gaps_s = first.planned[-1].arrival_s - first.planned[0].arrival_s
    assert len(first.planned) / gaps_s == pytest.approx(STEP**40, rel=0.15)
    assert [one.adapter for one in first.planned] != [one.adapter for one in second.planned]
    assert sorted(one.arrival_s for one in second.planned) == [one.arrival_s for one in second.planned]
    assert 0 < first.since_s < first.planned[-1].arrival_s


@pytest.mark.slow
def test_every_system_of_a_cell_has_a_rate_per_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_rates, "WARM_UP_S", 1.0)
    monkeypatch.setattr(bench_rates, "JUDGED_S", 4.0)
    monkeypatch.setattr(bench_rates, "SEEDS", (0, 1))
    monkeypatch.setattr(bench_rates, "ARRIVALS", ("poisson",))
    out = tmp_path / "out.jsonl"
    asked = ["--trace", str(TRACE), "--out", str(out), "--model", "DBRX", "--gpus", "12"]
    for _ in range(2):  # existing records do not run again
        done = CliRunner().invoke(main, asked, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    found = read_results(out)
    assert len(found) == 6
    rates = {(one["config"]["system"], one["config"]["seed"]): one["result"]["rate_per_s"] for one in found}
    for seed in (0, 1):
        slow, fast = (rates[f"coupled, kernels {ratio}", seed] for ratio in (2, 1))
        assert 0 < slow <= fast < rates["server", seed]
    for one in found:
        met = [point["rate_per_s"] for point in one["result"]["points"] if point["met"]]
        assert max(met) == one["result"]["rate_per_s"]
