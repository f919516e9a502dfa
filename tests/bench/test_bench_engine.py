# SPDX-License-Identifier: Apache-2.0
"""The benchmark itself: does it run, and do its records hold what the README says?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.engine.bench_engine import main
from bench.engine.engine_goals import goals
from bench.engine.engine_plan import PLANS
from bench.harness.interleave import interleave, ratio
from bench.harness.random_model import FULL, TINY, write_model
from moe_lora.report.results import read_results

SYSTEMS_WITH_ADAPTERS = {"engine base", "engine", "engine attention", "peft mixed", "peft grouped"}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("bench")
    out, plot = folder / "out.jsonl", folder / "plot.png"
    threads = torch.get_num_threads()
    done = CliRunner().invoke(main, ["--quick", "--out", str(out), "--plot", str(plot), "--num-threads", "1"])
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    return read_results(out)


@pytest.mark.slow
def test_each_cell_has_every_contestant(records: list[dict]) -> None:
    plan = PLANS["quick"]
    for num_requests, num_adapters in plan.cells():
        found = {
            r["config"]["system"]
            for r in records
            if (r["config"]["num_requests"], r["config"]["cell_num_adapters"]) == (num_requests, num_adapters)
        }
        assert found == (SYSTEMS_WITH_ADAPTERS if num_adapters else {"engine base", "transformers base"})


@pytest.mark.slow
def test_records_hold_speed_pairs_environment_and_bytes(records: list[dict]) -> None:
    for record in records:
        config, result = record["config"], record["result"]
        assert record["kind"] == "measured"
        assert record["env"]["cpu_cores"]
        assert config["model"]["num_parameters"] == TINY.num_parameters
        assert result["num_pairs"] == len(result["step_ms_rounds"]) > 0
        assert result["tokens_per_s"] == pytest.approx(1e3 * config["num_requests"] / result["step_ms"])
        for spread in result["speedup_over"].values():
            assert spread["min"] <= spread["p25"] <= spread["median"] <= spread["p75"] <= spread["max"]
        if config["system"].startswith("engine"):
            assert set(result["read_bytes"]) == {"weights", "kv", "adapters"}
            assert result["ceiling_tokens_per_s"] > 0
            assert (result["read_bytes"]["adapters"] > 0) == (config["num_adapters"] > 0)


@pytest.mark.slow
def test_tokens_of_the_run_equal_the_peers_in_fp32(records: list[dict]) -> None:
    checks = records[0]["result"]["correctness"]
    assert set(checks) == {"base", "attention adapters", "all adapters"}
    assert all(check["token_agreement"] == 1.0 for check in checks.values())


@pytest.mark.slow
def test_goals_are_read_from_the_records(records: list[dict]) -> None:
    found = goals(records, PLANS["quick"].headline)
    assert [goal.name.split(",")[0] for goal in found] == [
        "base over transformers",
        "base over transformers",
        "over peft grouped",
        "LoRA overhead",
        "share of the ceiling",
        "attention over peft mixed",
    ]


@pytest.mark.slow
def test_bytes_of_one_request_are_those_of_its_experts(records: list[dict]) -> None:
    (result,) = (
        r["result"]
        for r in records
        if (r["config"]["system"], r["config"]["num_requests"], r["config"]["cell_num_adapters"])
        == ("engine base", 1, 0)
    )
    hidden, inner, layers = TINY.hidden_size, TINY.intermediate_size, TINY.num_layers
    attention = 2 * hidden * TINY.head_dim * (TINY.num_heads + TINY.num_kv_heads)
    experts = TINY.num_experts * hidden + TINY.num_experts_per_token * 3 * hidden * inner
    elements = layers * (attention + experts + 2 * hidden) + hidden * (TINY.vocab_size + 2)
    assert result["read_bytes"]["weights"] == 4 * elements


def test_number_of_parameters_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(write_model(tmp_path, TINY) / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == TINY.num_parameters
    assert round(FULL.num_parameters / 1e6) == 440


def test_contestants_take_turns_and_slow_ones_sit_out() -> None:
    turns: list[str] = []

    def scripted(name: str, num_steps: int) -> float:
        turns.append(name)
        return 2.0 * num_steps

    times = interleave({"a": (partial(scripted, "a"), 4, 3), "b": (partial(scripted, "b"), 1, 2)}, 3)
    assert turns == ["a", "b", "b", "a", "a"]
    assert times == {"a": [2.0] * 3, "b": [2.0] * 2}


def test_a_long_bench_says_where_it_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr("bench.harness.interleave.PROGRESS_EVERY_S", 0.0)
    contestants = {("int8", 16): (lambda steps: 1.0 * steps, 1, 2)}
    interleave(contestants, 2)
    told = capsys.readouterr()
    assert told.err == "round 1 of 2: int8, 16\nround 2 of 2: int8, 16\n"
    assert not told.out


def test_ratio_pairs_the_rounds_that_both_have() -> None:
    found = ratio([2.0, 6.0], [1.0, 2.0, 5.0])
    assert (found["median"], found["min"], found["max"], found["num_pairs"]) == (2.5, 2.0, 3.0, 2)
    assert ratio([3.0], [2.0])["median"] == 1.5
