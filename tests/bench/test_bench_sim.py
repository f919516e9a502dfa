# SPDX-License-Identifier: Apache-2.0
"""The simulator's benchmark runs, and says what it found."""

import pytest
from click.testing import CliRunner

from bench.sim.bench_sim import RECORDED, main
from bench.sim.sim_validate import deviations
from moe_lora.report.results import read_results


def test_times_every_case(tmp_path):
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(main, ["--num-requests", "300", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    records = read_results(out)
    assert [r["config"]["name"] for r in records] == [
        "server",
        "server, too small",
        "server, low load",
        "coupled",
        "many",
    ]
    for record in records:
        assert record["kind"] == record["result"]["kind"] == "simulated"
        assert record["result"]["num_requests"] == 300 < record["result"]["num_events"]


def test_validation_needs_the_trace():
    done = CliRunner().invoke(main, ["--part", "validate"])
    assert done.exit_code == 2
    assert "--trace" in done.output


@pytest.mark.slow
def test_simulates_the_recorded_points(tmp_path):
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:17:{i:02}.000,{512 * (1 + i % 3)},{4 + i % 5}" for i in range(20)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    out = tmp_path / "out.jsonl"
    arguments = ["--part", "validate", "--trace", str(trace), "--out", str(out)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (record,) = read_results(out)
    paced = [r for r in read_results(RECORDED) if r["config"]["paced"] and r["config"]["size"] == "full"]
    assert len(record["result"]["points"]) == len(paced)


def test_deviations_are_ratios_but_of_shares_differences():
    row = dict.fromkeys(("p95_ttft_ms", "p95_decode_ttft_ms", "mean_tpot_ms"), (100.0, 110.0))
    row |= {"slo_attainment_adapters_decode_ttft": (0.5, 0.6), "window_output_throughput": (50.0, 25.0)}
    found = deviations([row])
    assert found["p95_ttft_ms"]["worst"] == pytest.approx(0.1)
    assert found["slo_attainment_adapters_decode_ttft"]["median"] == pytest.approx(0.1)
    assert found["window_output_throughput"]["worst"] == pytest.approx(0.5)
