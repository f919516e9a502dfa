# SPDX-License-Identifier: Apache-2.0
"""The simulated clusters: step times as the papers have them, the search for rates, tables, one small run."""

from __future__ import annotations

from dataclasses import replace

import click
import numpy as np
import pytest
from click.testing import CliRunner

from bench.cluster.simulated.cluster_sim_loraserve import (
    PEAK_PRECISION,
    SLO_TTFT_S,
    SYSTEMS,
    contestants,
    holds,
    loraserve_systems,
    peak_rate,
)
from bench.cluster.simulated.cluster_sim_plan import Planner, step_models
from bench.cluster.simulated.cluster_sim_report import summary_tables
from bench.cluster.simulated.cluster_simulated import simulate
from bench.placement import bench_clusters
from moe_lora.provision.placement.placement import PLACEMENTS
from moe_lora.provision.replayed.system import simulate as run_system
from moe_lora.report.results import read_results
from moe_lora.timing.step_model import Row
from tests.grids import with_quick


def same_rank(count: int, rank: int) -> list[Row]:
    return [Row(str(i), rank) for i in range(count)]


def test_step_times_are_those_of_the_papers():
    models = step_models(3)
    for name, figure_6_s in (("padded", (34.8e-3, 35.8e-3)), ("true_rank", (35.3e-3, 35.9e-3))):
        found = [models[name].decode_step_s(same_rank(*batch)) for batch in ((24, 32), (16, 64))]
        assert found == pytest.approx(figure_6_s, rel=2e-3)
        alone = [models[name].prefill_step_s([Row("a", rank, 2000)]) for rank in (8, 128)]
        assert alone[1] / alone[0] == pytest.approx(2.7, rel=0.01)
    assert models["padded"].prefill_step_s([Row(None, 0, 1024)]) == pytest.approx(90e-3, rel=0.01)


def test_one_high_rank_lengthens_only_a_padded_batch_much():
    mixed, low = [*same_rank(31, 8), Row("high", 128)], same_rank(32, 8)
    ratios = {
        name: model.decode_step_s(mixed) / model.decode_step_s(low) for name, model in step_models(4).items()
    }
    assert ratios["padded"] > 1.4
    assert ratios["roofline"] < ratios["true_rank"] < 1.02


@pytest.fixture(scope="module")
def systems():
    return loraserve_systems("padded", "production", 25, 20.0)


@pytest.mark.slow
def test_plans_keep_their_draws_at_any_rate(systems):
    slow, fast = systems.load.plan(5.0), systems.load.plan(10.0)
    assert len(fast) > 1.5 * len(slow)
    for one, other in zip(slow[:50], fast[:50], strict=True):
        assert one.arrival_s == pytest.approx(2 * other.arrival_s)
        assert (one.adapter, one.prompt_tokens) == (other.adapter, other.prompt_tokens)


@pytest.mark.parametrize("name", with_quick(SYSTEMS, ("loraserve", "optimal")))
def test_a_run_is_given_up_if_and_only_if_its_p95_is_beyond_the_slo(systems, name):
    made = next(contestants(name))
    verdicts = set()
    for rate in (5.0, 40.0):
        config, since_s = made(systems, 2, rate), systems.load.since_s
        result = run_system(config, systems.load.plan(rate))
        waits_s = result.column("first_token_s", since_s) - result.column("arrival_s", since_s)
        within = bool(np.mean(waits_s > SLO_TTFT_S) <= 0.05)
        assert holds(systems, config, rate) == within
        verdicts.add(within)
    assert verdicts == {True, False}


def test_the_peak_is_between_a_rate_that_holds_and_one_that_does_not(systems):
    made = next(contestants("optimal"))
    peak = peak_rate(systems, made, 2, 4.0)
    assert holds(systems, made(systems, 2, peak), peak)
    above = peak * (1 + PEAK_PRECISION) * 1.001
    assert not holds(systems, made(systems, 2, above), above)


def test_random_placements_are_drawn_several_times(systems):
    planners = [made(systems, 4, 5.0).placement.planner() for made in contestants("random")]
    tables = [planner({}, 0.0) for planner in planners]
    assert len({str(table) for table in tables}) == len(tables) > 1


def test_a_planner_places_by_what_it_was_told(systems):
    ranks, points = systems.load.ranks, systems.points
    planner = Planner(PLACEMENTS["loraserve"], ranks, 4, points, dict.fromkeys(ranks, 10.0))
    before = planner({}, 0.0)
    hot = next(iter(ranks))
    assert len(before[hot]) == 1
    for _ in range(4):
        after = planner(dict.fromkeys(ranks, 300.0) | {hot: 1e6}, 30.0)
    assert len(after[hot]) > 1


def test_tables_hold_ratios_to_the_reference():
    point = dict.fromkeys(("p95_ttft_s", "mean_tbt_s", "mean_held", "most_held", "num_fetches"), 1.0)
    config = {"study": "weak_scaling", "model": "padded", "popularity": "production"}
    config |= {"num_adapters": 100, "num_servers": 4}
    records = [
        {"config": config | {"system": name}, "result": {"peak_per_s": peak, "points": [point, point]}}
        for name, peak in (("loraserve", 20.0), ("contiguous", 10.0))
    ]
    printed = summary_tables(records)
    assert "simulated" in printed
    assert printed.splitlines()[-1].split()[:5] == ["contiguous", "10.0", "2.50", "2.00", "2"]
    assert "| contiguous | 10.0 | 2.50 | 2.00 | 2 |" in summary_tables(records, markdown=True)


def test_cells_are_chosen_by_their_label():
    with pytest.raises(click.UsageError, match="weak_scaling padded production 12\\n"):
        simulate(None, quick=False, only="no such cell")


@pytest.mark.slow
def test_the_quick_run_has_every_system_and_says_that_it_is_simulated(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    simulate(out, quick=True, only=None)
    records = read_results(out)
    assert {record["kind"] for record in records} == {"simulated"}
    studies = {record["config"]["study"] for record in records}
    assert studies == {"weak_scaling", "toppings"}
    placed = [record for record in records if record["config"]["study"] == "weak_scaling"]
    assert [record["config"]["system"] for record in placed] == list(SYSTEMS)
    assert all(0 <= one["result"].get("slo_attainment", 0) <= 1 for one in records)
    assert "rank_aware by it" in capsys.readouterr().out


def test_draws_differ_by_their_seed_and_the_first_is_the_recorded_one(systems):
    first, second = (replace(systems.load, seed=seed).plan(5.0) for seed in (0, 1))
    assert first == systems.load.plan(5.0)
    assert [one.arrival_s for one in first[:5]] != [one.arrival_s for one in second[:5]]


@pytest.mark.slow
def test_the_bench_of_placements_writes_a_record_a_system(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    out = tmp_path / "out.jsonl"
    arguments = ["--out", str(out), "--seeds", "1", "--sizes", "2", "--popularities", "production"]
    found = CliRunner().invoke(bench_clusters.main, [*arguments, "--length-s", "10"], catch_exceptions=False)
    assert found.exit_code == 0
    records = read_results(out)
    assert tuple(record["config"]["system"] for record in records) == bench_clusters.USUAL
    assert {record["kind"] for record in records} == {"simulated"}
    held = {record["config"]["system"]: record["result"]["mean_held"] for record in records}
    assert held["everywhere, rank_aware"] == 50
    assert held["loraserve"] < 50
    assert "| production | 2 | loraserve |" in found.output
