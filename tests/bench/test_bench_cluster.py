# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a cluster runs on a tiny model, and its tables say what its records say."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cluster.bench_cluster import main
from bench.cluster.cluster_plan import (
    FULL_PLAN,
    NO_LORA,
    PADDED,
    PLACED,
    QUICK_PLAN,
    ROUTED,
    TRACES,
    TRUE_RANK,
)
from bench.cluster.cluster_report import claims, disturbed, highest_rates, least_agreement, markdown
from bench.cluster.cluster_requests import demand_at_start, requests_of
from moe_lora.report.results import read_results


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def record(trace: str, kernel: str, load: float, system: str, **result: object) -> dict:
    config = {"section": "cells", "trace": trace, "kernel": kernel, "load": load, "system": system}
    return {"config": config, "result": {"same_answers": 1.0, **result}}


@pytest.mark.slow
def test_every_system_of_the_quick_plan_is_measured_on_the_same_requests(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    printed = run("--quick", "--out", str(out), "--plot", str(plot))
    records = read_results(out)
    assert {one["kind"] for one in records} == {"measured"}
    sections = [one["config"]["section"] for one in records]
    assert sections.count("machine") == sections.count("figure 1") == len(QUICK_PLAN.kernels)
    cells = [one for one in records if one["config"]["section"] == "cells"]
    systems = [(one["config"]["kernel"], one["config"]["system"]) for one in cells]
    assert sorted(systems) == sorted(
        (cell.kernel, system.name) for cell in QUICK_PLAN.cells for system in cell.systems
    )
    for one in cells:
        found = one["result"]
        assert found["failed"] == 0
        assert found["completed"] == cells[0]["result"]["completed"]
        assert 0 < found["mean_ttft_ms"] <= found["p95_ttft_ms"] * 20
        if one["config"]["system"] != NO_LORA.name:
            assert found["same_answers"] >= 0.99
            assert sum(found["adapters_used"]) >= QUICK_PLAN.num_adapters
            assert found["adapters_held"]["mean"] <= found["adapters_held"]["most"] <= QUICK_PLAN.num_adapters
        assert 0 <= found["tpt_attainment"] <= 1
        assert 0 <= found["others_busy"] <= found["machine_busy"]
    assert "P95 TTFT in ms" in printed
    assert "figure 1, sgmv" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_full_plan_has_every_trace_with_every_placement_and_both_kernels() -> None:
    padded = {cell.trace: cell for cell in FULL_PLAN.cells if cell.kernel == PADDED and cell.load == 0.45}
    assert set(padded) == set(TRACES)
    for cell in padded.values():
        assert set(PLACED) <= set(cell.systems)
        assert cell.systems[0] == NO_LORA
    for kernel in (PADDED, TRUE_RANK):
        assert any(set(ROUTED) <= set(cell.systems) for cell in FULL_PLAN.cells if cell.kernel == kernel), (
            kernel
        )
    assert sorted(set(FULL_PLAN.lora_ranks.values())) == [8, 16, 32, 64, 128]


@pytest.mark.parametrize("trace", TRACES)
def test_requests_are_the_same_each_time_and_even_arrivals_are_even(trace: str) -> None:
    requests = requests_of(QUICK_PLAN, trace, 50.0, 4.0)
    assert requests == requests_of(QUICK_PLAN, trace, 50.0, 4.0)
    assert all(one.adapter in QUICK_PLAN.adapters for one in requests)
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(requests)]
    assert (max(gaps) - min(gaps) < 0.002) == trace.startswith("even")


def test_demand_at_the_start_is_that_of_all_tokens_by_the_first_popularity() -> None:
    requests = requests_of(FULL_PLAN, "poisson shifting", 50.0, FULL_PLAN.duration_s)
    demand = demand_at_start(FULL_PLAN, "poisson shifting", requests)
    tokens = sum(one.prompt_tokens + one.output_tokens for one in requests)
    assert sum(demand.values()) == pytest.approx(tokens / FULL_PLAN.duration_s)
    high = [demand[name] for name, rank in FULL_PLAN.lora_ranks.items() if rank == 128]
    assert sum(high) == pytest.approx(sum(demand.values()) / 2)


def test_highest_rate_is_the_last_before_the_first_that_missed_the_slo() -> None:
    met = {"toppings": {0.3: True, 0.5: False, 0.7: True}, "loraserve": {0.3: True, 0.5: True, 0.7: True}}
    met["optimal"] = dict.fromkeys((0.3, 0.5, 0.7), False)
    records = [
        record("production", PADDED, load, system, ttft_slo_met=good)
        for system, of in met.items()
        for load, good in of.items()
    ]
    found = highest_rates(records)
    assert found == {"production, padded": {"loraserve": 0.7, "optimal": None, "toppings": 0.3}}


def test_claims_compare_kernels_on_the_requests_that_both_had() -> None:
    times = {(PADDED, "loraserve"): 100.0, (PADDED, "toppings"): 400.0}
    times |= {(TRUE_RANK, "loraserve"): 50.0, (TRUE_RANK, "toppings"): 60.0}
    records = [
        record(
            "production",
            kernel,
            0.5,
            system,
            p95_ttft_ms=time,
            ttft_slo_met=time < 200,
            adapters_held={"mean": 10.0, "most": 20.0 if system == "toppings" else 10.0},
            tpt_attainment=0.5,
        )
        for (kernel, system), time in times.items()
    ]
    text = claims(records)
    assert "P95 TTFT of toppings by that of loraserve, padded: 4.00" in text
    assert "most adapters held by an instance, toppings by loraserve: 2.00" in text
    assert "worst by best P95 TTFT of 2 systems 4.0 padded and 1.2 with true ranks" in text
    assert "all within the SLO with true ranks" in text


def test_runs_beside_other_programs_are_counted() -> None:
    records = [record("production", PADDED, 0.5, "toppings", others_busy=share) for share in (0.0, 0.04, 0.2)]
    assert disturbed(records) == 1


def test_cells_in_which_every_placement_timed_out_are_not_compared() -> None:
    result = {"adapters_held": {"mean": 1.0, "most": 1.0}, "ttft_slo_met": False, "tpt_attainment": None}
    records = [
        record("production", PADDED, load, system, p95_ttft_ms=time, **result)
        for load, times in ((0.3, (100.0, 300.0)), (0.6, (5000.0, 5000.0)))
        for system, time in zip(("loraserve", "toppings"), times, strict=True)
    ]
    assert "P95 TTFT of toppings by that of loraserve, padded: 3.00 (paper" in claims(records)


def test_agreement_is_the_least_of_all_systems_and_markdown_needs_cells() -> None:
    records = [record("production", PADDED, 0.5, "loraserve"), record("production", PADDED, 0.5, "toppings")]
    records[1]["result"]["same_answers"] = 0.4
    assert least_agreement(records) == 0.4
    assert least_agreement([]) == 1.0
    assert markdown([]) == ""
