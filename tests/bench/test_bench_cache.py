# SPDX-License-Identifier: Apache-2.0
"""The cache's benchmark runs, and its tables say what its records say."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cache.bench_cache import cells, main
from bench.cache.cache_plan import OURS, POLICIES, config_of, settings_of
from bench.cache.cache_rates import chosen
from bench.cache.cache_report import ratio
from bench.cache.cache_simulated import simulated
from moe_lora.report.results import read_results

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def run(*arguments):
    done = CliRunner().invoke(main, [*arguments, "--quick"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_measured_part_compares_policies_that_answer_alike(tmp_path):
    out = tmp_path / "out.jsonl"
    printed = run("--part", "measured", "--out", str(out))
    records = read_results(out)
    assert {record["kind"] for record in records} == {"measured"}
    assert {record["config"]["policy"] for record in records} == {"lru", "cost-aware"}
    for record in records:
        assert record["result"]["same_answers"] == 1.0
        parts = ("queue_ms", "adapter_cold_ms", "history_cold_ms", "prefill_ms")
        assert 0 < sum(record["result"][part] for part in parts) <= record["result"]["ttft_ms"] * 1.01
    assert "simulated" not in printed


@pytest.mark.slow
def test_simulated_part_has_every_policy_and_a_figure(tmp_path):
    out = tmp_path / "out.jsonl"
    printed = run("--out", str(out))
    records = read_results(out)
    assert [record["config"]["policy"] for record in records] == list(POLICIES)
    assert {record["kind"] for record in records} == {"simulated"}
    for record in records:
        result = record["result"]
        parts = ("queue_ms", "adapter_cold_ms", "history_cold_ms", "prefill_ms")
        assert sum(result[part] for part in parts) == pytest.approx(result["ttft_ms"])
        assert result["settings"][record["config"]["setting"]] == min(result["settings"].values())
    assert "paper" in printed


def test_ratios_are_geometric_means_over_cells_that_both_have():
    def record(policy, num_adapters, ttft_ms):
        config = {"policy": policy, "model": "7B", "num_adapters": num_adapters, "application": "agents"}
        return {"config": config, "result": {"ttft_ms": ttft_ms}}

    records = [record("a", 20, 1.0), record("b", 20, 4.0), record("a", 50, 3.0), record("b", 50, 3.0)]
    records.append(record("a", 100, 7.0))
    assert ratio(records, "a", "b", "ttft_ms") == pytest.approx(0.5)


def test_ten_rates_go_by_the_peak_and_the_settings_of_the_same_cell():
    def record(num_adapters, application, policy, setting, top):
        config = {"model": "7B", "num_adapters": num_adapters, "application": application}
        return {"config": config | {"policy": policy, "setting": setting, "rates_per_s": [top / 2, top]}}

    found = [
        record(100, "agents", "static", "0.05", 10.0),
        record(100, "agents", "fastlibra", "5", 10.0),
        record(50, "agents", "fastlibra", "60", 11.0),
        record(100, "chatbots", "fastlibra", "600", 4.0),
    ]
    assert chosen(found, "agents") == (10.0, {"static": "0.05", "fastlibra": "5"})


def test_cells_cover_the_papers_models_and_adapter_counts():
    names = [cell.name for cell in cells(None, quick=False)]
    assert {name["num_adapters"] for name in names} == {20, 50, 100, 1000, 2000}
    assert {name["model"] for name in names} == {"7B", "13B", "34B"}
    assert {name["popularity"] for name in names} == {
        "own",
        "distinct",
        "uniform",
        "skewed-0.1",
        "skewed-0.3",
    }


def test_7b_has_half_a_megabyte_of_kv_a_token_and_adapters_of_67_and_134_megabytes():
    config = config_of("7B", 2)
    assert config.time.kv_token_bytes == 2**19
    sizes = [pages * config.page_bytes for pages in config.adapter_pages.values()]
    assert sizes == [2**26, 2**27]
    assert 40e9 < config.num_device_pages * config.page_bytes < 45e9


@pytest.mark.slow
@pytest.mark.shared_data
def test_conversations_that_come_back_late_are_found_as_often_as_by_fastlibra():
    """Most of Mooncake's come back after the host has dropped what was kept by their first use alone."""
    path = SHARED / "mooncake_synthetic.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not there")
    (cell,) = (
        cell
        for cell in cells(str(path), quick=False)
        if cell.name["num_adapters"] == 100 and cell.name["application"] == "chatbots (Mooncake)"
    )
    ours, theirs = (
        simulated(cell, settings_of(policy)[unit], 6.0) for policy, unit in ((OURS, ""), ("fastlibra", "60"))
    )
    hits = [point["kv_device_hit_rate"] + point["kv_host_hit_rate"] for point in (ours, theirs)]
    assert hits[0] > hits[1]
    assert ours["ttft_ms"] < 1.05 * theirs["ttft_ms"]
