# SPDX-License-Identifier: Apache-2.0
"""What the dLoRA bench asks for, and that its parts run."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.dlora import bench_instances, dlora_simulated
from bench.dlora.dlora_engine import QUICK_PLAN, engine_points
from bench.dlora.dlora_plan import (
    ARTIFACT,
    PAPER,
    SKEWNESS,
    SLO_S,
    STEP_S,
    TRUE_RANK,
    Work,
    largest_share,
    llama_7b,
    requests,
)
from bench.dlora.dlora_replicas import SYSTEMS as FLEETS
from bench.dlora.dlora_replicas import WORK
from bench.dlora.dlora_replicas import figures as replica_figures
from bench.dlora.dlora_simulated import SYSTEMS, batching_points, of_seeds, rate_at_slo
from bench.harness.random_model import TINY
from bench.harness.records import Recorder
from tests.grids import with_quick

SHORT = Work(skewness=16, rate_per_s=4.0, duration_s=4.0)


def test_a_larger_skewness_gives_the_first_adapter_more() -> None:
    shares = [largest_share(replace(SHORT, skewness=skewness)) for skewness in (0, *SKEWNESS, math.inf)]
    assert all(before < after for before, after in pairwise(shares))
    assert shares[0] == 1 / 8
    assert shares[-1] == 1


def test_deltas_of_a_full_batch_take_their_share_of_a_step() -> None:
    for machine in (PAPER, ARTIFACT, TRUE_RANK):
        time = llama_7b(machine)
        assert time.step_s(64, 0, 0, 0) == pytest.approx(STEP_S)
        assert time.step_s(64, 0, 0, 0, 64) == pytest.approx(STEP_S * (1 + machine.delta_share))


def test_equal_work_gives_equal_requests() -> None:
    assert requests(SHORT) == requests(SHORT)
    assert requests(SHORT) != requests(replace(SHORT, seed=1))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_policy_serves_everybody(system: str) -> None:
    found = of_seeds(system, PAPER, [SHORT])
    assert found["num_requests"] == len(requests(SHORT))
    assert 0.04 < found["average_s"] <= found["worst_s"]
    assert (found["num_merges"] > 0) == (system != "unmerged")


def test_load_at_the_slo_is_found_between_the_rates_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlora_simulated, "simulate", lambda system, machine, work: work.rate_per_s)
    monkeypatch.setattr(dlora_simulated, "figures", lambda rate: {"average_s": rate / 8 * SLO_S})
    assert rate_at_slo(PAPER, SHORT) == pytest.approx(8, rel=0.04)


@pytest.mark.slow
def test_points_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlora_simulated, "rate_at_slo", lambda machine, work: 4.0)
    seen = []
    batching_points(lambda config, result: seen.append(config), duration_s=1.0, num_seeds=1)
    assert {config["system"] for config in seen} == set(SYSTEMS)
    assert {config["machine"]["name"] for config in seen} == {"paper", "artifact", "true rank"}
    assert {config["load"] for config in seen} == {1.0, 0.5}


@pytest.mark.parametrize("system", with_quick(FLEETS, FLEETS[2:]))
def test_replicas_serve_everybody(system: str) -> None:
    work = replace(WORK, duration_s=1.0)
    found = replica_figures(system, work)
    assert found["num_requests"] == len(requests(work))
    assert len(found["busy_share"]) == 8
    assert 0 <= found["slo_share"] <= 1
    assert 0.5 < found["inference_share"] <= 1
    assert (found["num_plans"] > 0) <= system.endswith("migration")


@pytest.mark.slow
def test_the_real_engine_serves_every_policy() -> None:
    """A tiny model; every request ends, and policies that merge have merged."""
    seen = []
    plan = replace(QUICK_PLAN, size=TINY, skewness=(math.inf,), duration_s=0.5, num_steps=1)
    engine_points(lambda config, result: seen.append((config, result)), plan)
    (share, steps), *skew = seen
    assert share["part"] == "share"
    assert set(steps["step_ms"]) == {"base", "unmerged", "unmerged, one", "merged, one"}
    found = {config["system"]: result for config, result in skew}
    assert set(found) == set(SYSTEMS)
    assert len({result["num_requests"] for result in found.values()}) == 1
    assert found["unmerged"]["num_merges"] == found["unmerged"]["steps_merged"] == 0
    assert found["merged"]["steps_merged"] > 0


def test_what_four_instances_must_not_do_is_told() -> None:
    right = {"wrong_answers": 0, "core_share": bench_instances.MAX_SHARE}
    assert bench_instances._problems("proactive", 0, right) == []
    wrong = bench_instances._problems("proactive", 1, {"wrong_answers": 2, "core_share": 0.8})
    assert wrong == [
        "proactive, round 1: 2 answers are not those of the first system",
        "proactive, round 1: real work took 80% of a core, and 70% may be",
    ]


def test_systems_of_four_instances_differ_in_routing_and_migration(tmp_path) -> None:
    found = [bench_instances.front_end(system, tmp_path) for system in FLEETS]
    assert {one.placement for one in found} == {"burst_tolerance"}
    assert [one.routing for one in found] == [None, "shortest_pending_time", "shortest_pending_time"]
    assert [one.migration for one in found] == ["off", "off", "dlora"]


@pytest.mark.slow
def test_four_paced_instances_serve_everybody_and_move_some() -> None:
    recorder = Recorder(None, "emulated")
    work = replace(bench_instances.WORK, duration_s=6.0, rate_per_s=14.0)
    problems = asyncio.run(bench_instances.measure(recorder, work, num_rounds=1))
    assert not [
        one for one in problems if "of a core" not in one
    ]  # how busy the machine is is not asked here
    results = {one["config"]["system"]: one["result"] for one in recorder.records}
    assert set(results) == set(FLEETS)
    assert {one["num_requests"] for one in results.values()} == {len(requests(work))}
    moves = [sum(results[system]["num_moves"].values()) for system in FLEETS]
    assert moves[:2] == [0, 0]
    assert moves[2] > 0
