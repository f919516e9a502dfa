# SPDX-License-Identifier: Apache-2.0
"""The disaggregation benchmark: do its devices add up as in the paper, and does it run?"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.lora_server.bench_disagg import main
from bench.lora_server.disagg_device import GIB, read_device
from bench.lora_server.disagg_expect import serviceable_rate
from bench.lora_server.disagg_plan import ablation, coupled, disaggregated, make_plan
from bench.lora_server.disagg_report import serviceable
from moe_lora.report.results import read_results

DEVICE = read_device()
MIXTRAL = {
    **DEVICE.profile,
    "instance_gpus": 2,
    "shape": DEVICE.profile["shape"]
    | {"num_layers": 32, "num_parameters": 46_700_000_000, "num_heads": 32}
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_experts": 8, "num_experts_per_token": 2},
}


def test_memory_rules_give_the_capacities_of_the_paper_for_mixtral() -> None:
    mixtral = type(DEVICE)(MIXTRAL)
    assert mixtral.adapter_bytes / GIB == pytest.approx(1.69, abs=0.005)  # section 2.3
    assert 4 * mixtral.instance_slots(0.5) == 100  # section 6.4
    assert mixtral.server_slots(2) == 104


def test_stage_times_give_table_4_for_mixtral() -> None:
    stages, tables = type(DEVICE)(MIXTRAL).stages, DEVICE.hardware.tables
    for rows in (128, 256):
        assert stages.experts.seconds(rows) == pytest.approx(tables["base_us.experts"].seconds(rows))
        assert stages.lora.seconds(rows) == pytest.approx(tables["server_us.4.compute"].seconds(rows))
        assert stages.transfer.seconds(rows) == pytest.approx(
            tables["server_us.4.receive"].seconds(rows) + tables["server_us.4.send"].seconds(rows)
        )


def test_tiny_models_layers_take_the_time_of_all_real_ones() -> None:
    profile = DEVICE.step_profile(2, 3.0, kernel_ratio=1.0, overlap=True)
    layers = 2 * (profile.attention.seconds(10) + profile.experts.seconds(10) + profile.lora.seconds(10))
    assert layers == pytest.approx(3 * DEVICE.step_s(9, remote=False))


def test_both_sides_have_as_many_gpus() -> None:
    for size in ("quick", "full"):
        assert {s.system.num_gpus for s in make_plan(DEVICE, size).series} == {12}


def test_ablation_has_equal_capacity_and_changes_one_switch_at_a_time() -> None:
    base, *steps = ablation(coupled(DEVICE, 0.5, 3), disaggregated(DEVICE, 2, 4), 2.0)
    assert {step.slots for step in steps} == {base.slots * base.num_instances}
    for before, after in pairwise(steps):
        changed = {key for key, value in vars(after).items() if vars(before)[key] != value} - {"name"}
        assert len(changed) == 1


def test_expected_rate_is_bound_by_what_runs_out() -> None:
    popularity = [np.ones(4) / 4]
    assert serviceable_rate(popularity, 4, 1, 1e9, 10, lambda rows: 0.01 * (1 + rows)).binds == "TPOT"
    assert serviceable_rate(popularity, 4, 1, 3, 10, lambda rows: 0.01).binds == "KV"
    assert serviceable_rate(popularity, 1, 1, 1e9, 10, lambda rows: 0.01).binds == "slots"


def test_serviceable_rate_lies_where_the_logarithm_crosses() -> None:
    assert serviceable([(10, 0.5), (20, 2.0), (30, 0.9)]) == (pytest.approx(15), "=")
    assert serviceable([(10, 0.5), (20, 0.9)]) == (20, ">")
    assert serviceable([(10, 1.5)]) == (10, "<")


@pytest.mark.slow
def test_runs_labels_and_resumes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:17:{i:02}.000,{512 * (1 + i % 3)},{4 + i % 5}" for i in range(20)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    out = tmp_path / "out.jsonl"
    arguments = ["--tiny", "--trace", str(trace), "--out", str(out), "--plot-dir", str(tmp_path)]
    for _ in range(2):
        done = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    records = read_results(out)
    assert [r["config"]["system"]["name"] for r in records] == ["coupled 50/50", "disaggregated"]
    for record in records:
        assert record["kind"] == "emulated"
        assert record["result"]["failed"] == 0 < record["result"]["completed"]
        assert record["result"]["p95_decode_ttft_ms"] > 0
    assert (tmp_path / "disagg_poisson.png").read_bytes().startswith(b"\x89PNG")
