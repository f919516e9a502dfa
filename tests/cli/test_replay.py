# SPDX-License-Identifier: Apache-2.0
"""`moe-lora replay` as a user types it, against a server that speaks the protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from moe_lora.cli import replay_run
from moe_lora.cli.main import main
from moe_lora.report import read_results
from tests.sse_server import Served, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running_server() as served:
        yield served


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    rows = [{"arrival_s": i * 0.01, "prompt_tokens": 4 + i, "output_tokens": 3} for i in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(server: Served, trace: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", "--url", server.url, "--trace", str(trace), *arguments])


def test_replay_shows_a_table_and_writes_all_files(server: Served, trace: Path, tmp_path: Path) -> None:
    out = {name: tmp_path / name for name in ("r.json", "r.jsonl", "r.html")}
    result = run(
        server,
        trace,
        *("--lora-modules", "reverse", "other", "--zipf", "1.0", "--label", "ours"),
        *("--save-result", str(out["r.json"])),
        *("--append-result", str(out["r.jsonl"]), "--report", str(out["r.html"])),
    )
    assert result.exit_code == 0, result.output
    assert "TTFT P95" in result.output
    saved = json.loads(out["r.json"].read_text())
    assert saved["completed"] == 10
    assert set(saved["adapters"]) == {"reverse", "other"}
    assert saved["config"]["zipf"] == 1.0
    assert saved["config"]["format"] == "own"
    assert {
        "mean_ttft_ms",
        "p95_ttft_ms",
        "mean_tpot_ms",
        "output_throughput",
        "slo_attainment_adapters",
    } <= set(saved)
    (record,) = read_results(out["r.jsonl"])
    assert record["kind"] == "measured"
    assert record["result"]["completed"] == 10
    assert "ours" in out["r.html"].read_text()
    again = CliRunner().invoke(
        main, ["report", str(out["r.json"]), str(out["r.json"]), "--out", str(out["r.html"])]
    )
    assert again.exit_code == 0, again.output


def test_num_adapters_takes_the_first_the_server_lists(server: Served, trace: Path, tmp_path: Path) -> None:
    saved = tmp_path / "r.json"
    assert run(server, trace, "--num-adapters", "1", "--save-result", str(saved)).exit_code == 0
    assert set(json.loads(saved.read_text())["adapters"]) == {"reverse"}
    result = run(server, trace, "--num-adapters", "3")
    assert result.exit_code == 1
    assert "lists 2 adapters; choose 1 to 2" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "zipf"),
        (["--zipf", "0.5"], "zipf:0.5"),
        (["--popularity", "two-level:1,1"], "two-level:1,1"),
    ],
)
def test_popularity_is_saved_by_name(
    server: Served, trace: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    saved = tmp_path / "r.json"
    result = run(server, trace, "--num-adapters", "2", *arguments, "--save-result", str(saved))
    assert result.exit_code == 0, result.output
    run_saved = json.loads(saved.read_text())
    assert run_saved["config"]["popularity"] == said
    if "two-level" in said:
        assert set(run_saved["adapters"]) == {"reverse"}


def test_functions_trace_brings_arrivals_and_adapters(server: Served, trace: Path, tmp_path: Path) -> None:
    functions, saved = tmp_path / "f.csv", tmp_path / "r.json"
    functions.write_text("app,func,end_timestamp,duration\np,f,7.1,0.1\np,f,7.2,0.1\np,g,7.3,0.1\n")
    arguments = ["--functions", str(functions), "--num-adapters", "2", "--save-result", str(saved)]
    result = run(server, trace, *arguments)
    assert result.exit_code == 0, result.output
    run_saved = json.loads(saved.read_text())
    assert run_saved["adapters"] == ["reverse", "reverse", "other"]
    assert run_saved["arrival_times"] == pytest.approx([0.0, 0.1, 0.2])


def test_names_in_the_trace_are_mapped_to_the_adapters(server: Served, tmp_path: Path) -> None:
    trace, saved = tmp_path / "chat.jsonl", tmp_path / "r.json"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a b"}]
    rows = [{"model": name, "conversation": turns} for name in ("koala", "vicuna", "vicuna")]
    trace.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--num-adapters", "2", "--request-rate", "100", "--skewness", "1"]
    result = run(server, trace, *arguments, "--save-result", str(saved))
    assert result.exit_code == 0, result.output
    assert json.loads(saved.read_text())["adapters"] == ["other", "reverse", "reverse"]


def test_data_set_with_answers_gives_the_share_of_exact_ones(
    server: Served, trace: Path, tmp_path: Path
) -> None:
    rows = [
        {"adapter": "reverse", "prompt": "abc", "answer": "cba"},
        {"adapter": "reverse", "prompt": "abcd", "answer": "?"},
    ]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    saved = tmp_path / "r.json"
    result = run(
        server, trace, "--lora-modules", "reverse", "--prompts", str(prompts), "--save-result", str(saved)
    )
    assert result.exit_code == 0, result.output
    assert json.loads(saved.read_text())["exact_answers"] == 0.5
    assert "Exact answers" in result.output


def test_rate_draws_arrivals_and_duration_cuts_them(server: Served, trace: Path, tmp_path: Path) -> None:
    saved = tmp_path / "r.json"
    arguments = [
        "--request-rate",
        "100",
        "--burstiness",
        "0.5",
        "--duration-s",
        "0.3",
        "--save-result",
        str(saved),
    ]
    assert run(server, trace, *arguments).exit_code == 0
    arrivals = json.loads(saved.read_text())["arrival_times"]
    assert len(arrivals) > 10
    assert max(arrivals) < 0.3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lora-modules", "absent"], "does not serve absent; it serves reverse, other, base"),
        (["--lora-modules", "reverse", "--num-adapters", "1"], "exclude each other"),
        (["--popularity", "zipff", "--num-adapters", "1"], "long-tail"),
        (["--popularity", "uniform"], "no adapter to choose from"),
        (["--zipf", "1"], "popularity zipf:1.0: no adapter to choose from"),
        (
            ["--popularity", "uniform", "--zipf", "1", "--num-adapters", "1"],
            "exclude each other",
        ),
        (["--functions", "TRACE", "--num-adapters", "1"], "no Azure Functions trace"),
        (["--functions", "TRACE"], "no adapter to map to"),
        (["--skewness", "2", "--num-adapters", "1"], "names no adapter to map"),
        (["--slo-ttft-s", "0"], "slo ttft_s=0.0"),
        (["--format", "azure"], "no column 'TIMESTAMP'"),
        (["--burstiness", "0.5"], "--arrivals gamma"),
        (["--prompts", "TRACE", "--random-prompts"], "exclude each other"),
    ],
)
def test_mistake_is_told_in_one_line(server: Served, trace: Path, arguments: list[str], said: str) -> None:
    result = run(server, trace, *[str(trace) if word == "TRACE" else word for word in arguments])
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lora-modules", "reverse"], "leave --lora-modules out, or map the names by --skewness"),
        (["--num-adapters", "2", "--zipf", "2"], "leave --num-adapters and --zipf out"),
        (["--num-adapters", "2", "--zipf", "2", "--skewness", "1"], "leave --zipf out"),
        (["--num-adapters", "2", "--popularity", "uniform", "--skewness", "1"], "leave --popularity out"),
        (["--adapter-counts", "TRACE"], "leave --adapter-counts out"),
    ],
)
def test_a_popularity_over_a_trace_of_named_adapters_is_refused(
    server: Served, tmp_path: Path, arguments: list[str], said: str
) -> None:
    trace = tmp_path / "named.jsonl"
    rows = [
        {"arrival_s": i * 0.01, "prompt_tokens": 4, "output_tokens": 3, "adapter": "other"} for i in (0, 1)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    result = run(server, trace, *[str(trace) if word == "TRACE" else word for word in arguments])
    assert result.exit_code == 2
    assert f"each request of the trace names its adapter; {said}" in result.output


def test_no_server_is_told_in_one_line(trace: Path) -> None:
    result = CliRunner().invoke(main, ["replay", "--url", "http://127.0.0.1:1", "--trace", str(trace)])
    assert result.exit_code == 1
    assert "no server at http://127.0.0.1:1" in result.output


def test_run_with_no_completed_request_fails_and_says_why(server: Served, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt": "error", "output_tokens": 3}')
    result = run(server, trace)
    assert result.exit_code == 1
    assert "1 requests failed: HTTP 503: overloaded" in result.output
    assert "no request was completed" in result.output


@pytest.mark.parametrize("error", [OSError("no space left"), KeyError("no space left")])
def test_markup_in_a_label_and_a_failed_file_lose_no_other(
    server: Served, trace: Path, tmp_path: Path, error: Exception
) -> None:
    saved, lines = tmp_path / "r.json", tmp_path / "r.jsonl"
    arguments = ("--label", "run [/a] [int8]", "--save-result", str(saved), "--append-result", str(lines))
    with patch.object(replay_run, "write_json", side_effect=error):
        result = run(server, trace, *arguments)
    assert result.exit_code == 1
    assert f"{saved} was not written: {error}" in result.output
    assert "run [/a] [int8]" in result.output
    assert len(list(read_results(lines))) == 1


def test_targets_are_checked_before_anything_is_sent(server: Served, trace: Path, tmp_path: Path) -> None:
    sent = len(server.bodies)
    result = run(server, trace, "--save-result", str(trace / "r.json"))
    assert result.exit_code == 1
    assert "--save-result=" in result.output
    assert "there is no folder" in result.output
    assert len(server.bodies) == sent
    out = ("--out", str(trace / "x.json"))
    commands = ("profile-steps", str(tmp_path)), ("operating-points", str(tmp_path), "--slo-ttft-s", "1")
    for command in (commands[0], (*commands[1], "--slo-tpot-s", "1")):
        result = CliRunner().invoke(main, [*command, *out])
        assert result.exit_code == 1
        assert "--out=" in result.output
