# SPDX-License-Identifier: Apache-2.0
"""`moe-lora provision` as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moe_lora.cli import provision_result
from moe_lora.cli.main import main
from moe_lora.cli.options import FORMATS as OPTION_FORMATS
from moe_lora.config.cluster import read_cluster
from moe_lora.provision.admission.iar import expected_active
from moe_lora.provision.plan import compared, two_simulators
from moe_lora.provision.plan import verify as replayed
from moe_lora.provision.plan.verify import planned_load
from moe_lora.workload.popularity.named import long_tail, production_ranks, shifting_ranks
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.traces.traces import FORMATS, read_trace
from tests.families import make_checkpoint
from tests.provision.plan.conftest import shares_computed_once  # noqa: F401  (the fixture)

ROOT = Path(__file__).parents[2]


FEW = 200
"""Requests of a check."""


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "NUM_REQUESTS", FEW)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """100 requests, ten a second, of 200 output tokens; nobody's adapters."""
    return write_trace(tmp_path / "trace.jsonl", [{} for _ in range(100)])


def write_trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    usual = [
        {"arrival_s": i * 0.1, "prompt_tokens": 500, "output_tokens": 200} | row for i, row in enumerate(rows)
    ]
    path.write_text("\n".join(map(json.dumps, usual)))
    return path


def run(trace: Path, *arguments: str, model: str = "Mixtral-8x7B") -> Result:
    return CliRunner().invoke(main, ["provision", "--trace", str(trace), "--model", model, *arguments])


def planned(*arguments: Any, **options: Any) -> dict[str, Any]:
    result = run(*arguments, "--json", **options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_holds_the_plan(trace: Path) -> None:
    plan = planned(trace, "--adapters", "128")
    assert plan["global_batch"] == pytest.approx(10 * 200 * plan["tpot_s"], rel=1e-4)
    assert plan["kind"] in ("coupled", "lora_server")
    assert plan["total_gpus"] >= plan["lower_bound"]["gpus"] >= 1
    assert "a LoRA Server" in plan["compared"]
    assert plan["inputs"]["prompts"]["prompt_tokens"] == 500
    assert plan["inputs"]["num_adapters"] == 128
    assert plan["inputs"]["lora_ranks"] == [[64, 1.0]]
    assert plan["bytes_per_adapter"] == pytest.approx(1.81e9, rel=0.01)


def test_table_names_what_binds_and_what_was_assumed(trace: Path) -> None:
    result = run(trace, "--adapters", "128")
    assert result.exit_code == 0
    wanted = ("M*", "Lower bound", "Chosen", "Never ran there", "1.68 GB", "zipf:1.2", "Little's law")
    for text in (*wanted, "500 tokens on average, no prefix hits", "InfiniLoRA (arXiv 2604.07173) table 4"):
        assert text in result.output


def test_files_are_written_and_the_cluster_file_is_one(trace: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    result = run(trace, "--adapters", "64", "--out", str(out), "--report", str(page))
    assert result.exit_code == 0, result.output
    assert "put the checkpoint's folder in place of MODEL_DIR" in result.output
    read = read_cluster(out)
    assert read.lora_server is None
    assert read.engine.max_loras > 1
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "http" not in text.replace("data:image", "")


def test_quantised_weights_take_fewer_gpus_and_are_asked_for_in_the_cluster_file(
    trace: Path, tmp_path: Path
) -> None:
    out, words = tmp_path / "plan.yaml", ("--adapters", "64", "--instance-gpus", "1")
    refused = run(trace, *words, "--slo-tpot-s", "0.2")
    assert refused.exit_code == 2
    assert "exceed what 1 GPUs give an instance" in refused.output
    assert "or give --quantize" in refused.output
    result = run(trace, *words, "--slo-tpot-s", "0.2", "--quantize", "int4", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "Mixtral-8x7B held as int4-64" in result.output
    assert "weights held as int4-64: their bytes, at the rates" in result.output
    assert read_cluster(str(out)).engine.quantize == "int4"
    wrong = run(trace, *words, "--quantize-group-size", "32")
    assert wrong.exit_code == 2
    assert "quantize_group_size=32 is for int4 and fp8" in wrong.output


def test_formats_that_no_instance_could_start_with_are_refused(trace: Path, tmp_path: Path) -> None:
    small = make_checkpoint("llama", tmp_path / "small", hidden_size=96)
    for quantize, refusal in (
        ("int8-dynamic", "quantize='int8-dynamic' runs on CPU only so far, and plans are for"),
        ("int4", "quantize='int4' can't hold qkv: its 96 inputs are no multiple of the group size 64"),
    ):
        result = run(trace, "--adapters", "64", "--quantize", quantize, model=str(small))
        assert result.exit_code == 2
        assert refusal in " ".join(result.output.split())


def test_a_checkpoints_folder_is_named_in_the_cluster_file(tmp_path: Path) -> None:
    short = [{"prompt_tokens": 150, "output_tokens": 50} for _ in range(100)]
    trace, out = write_trace(tmp_path / "trace.jsonl", short), tmp_path / "plan.yaml"
    model = str(ROOT / "demo" / "model")
    result = run(trace, "--adapters", "8", "--lora-rank", "8", "--out", str(out), model=model)
    assert result.exit_code == 0, result.output
    assert Path(read_cluster(out).engine.model_dir) == Path(model)
    assert "placeholder" not in out.read_text()


def test_popularity_comes_from_the_trace_unless_given(tmp_path: Path) -> None:
    names = ["a", "a", "a", "b", "c"] * 20
    trace = write_trace(tmp_path / "t.jsonl", [{"adapter": name} for name in names])
    assert planned(trace)["inputs"]["num_adapters"] == 3
    assert planned(trace, "--adapters", "7")["inputs"]["num_adapters"] == 7
    counts = tmp_path / "counts.csv"
    counts.write_text("adapter,count\nx,3\ny,1\n")
    assert planned(trace, "--popularity", str(counts))["inputs"]["num_adapters"] == 2


def test_all_rows_of_a_trace_count_and_replays_take_runs_of_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    monkeypatch.setattr(compared, "checked_plan", lambda inputs, trace: parts.append((inputs, trace)))
    lengths = [100] * 2 * FEW + [4000] * 2 * FEW
    rows = [{"prompt_tokens": length, "output_tokens": length // 100} for length in lengths]
    run(write_trace(tmp_path / "trace.jsonl", rows), "--adapters", "2")
    [(inputs, trace)] = parts
    assert (inputs.prompts.prompt_tokens, inputs.prompts.longest) == (2050, 4040)
    assert inputs.prompts.output_tokens == inputs.output_tokens == 20.5
    replayed_lengths = [one.prompt_tokens for one in trace.requests]
    assert replayed_lengths.count(100) == replayed_lengths.count(4000) >= FEW // 2
    checked = planned_load(inputs, 1.0, trace, num_requests=FEW // 2).requests["poisson"]
    assert [one.prompt_tokens for one in checked].count(4000) >= FEW // 4 - 5


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    rows = [{"output_tokens": 0 if index % 4 == 0 else 200} for index in range(20)]
    result = run(write_trace(tmp_path / "trace.jsonl", rows), "--adapters", "2", "--json")
    assert "trace.jsonl: 5 rows left out: no output tokens (failed request)" in result.stderr
    assert json.loads(result.stdout)["total_gpus"] > 0


def test_a_plan_says_that_replays_take_a_part_of_the_trace(trace: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(FEW + 1)]
    few = 2 * FEW // 3
    for total, most in ((FEW + 1, FEW), (few + 1, few + 1)):
        path = write_trace(tmp_path / "long.jsonl", rows[:total])
        said = f"- the search replays {few} and {most} of the trace's {total} requests, in 12 runs;"
        assert said in run(path, "--adapters", "2").stdout
    assert "search replays" not in run(trace, "--adapters", "2").stdout


def test_prefixes_are_by_adapter_only_where_the_plan_is_for_the_traces(tmp_path: Path) -> None:
    rows = [{"adapter": f"a{i}", "hash_ids": [0], "prompt_tokens": 1024} for i in range(8)]
    trace = write_trace(tmp_path / "named.jsonl", rows)
    for words, share in (((), 0.0), (("--adapters", "4"), 7 / 16)):
        assert planned(trace, *words)["inputs"]["prompts"]["hit_share"] == share


@pytest.mark.parametrize(
    ("popularity", "same_as"),
    [
        ("zipf:0.7", lambda names: zipf(names, 0.7)),
        ("long-tail", long_tail),
        ("loraserve:production", production_ranks),
        ("loraserve:shifting", lambda names: shifting_ranks(names).at(0.5)),
    ],
)
def test_popularity_has_the_names_of_replay(trace: Path, popularity: str, same_as: Any) -> None:
    names = [str(index) for index in range(40)]
    plan = planned(trace, "--adapters", "40", "--popularity", popularity)
    in_service = plan["requests_in_service"] / (plan["instances"] if plan["kind"] == "coupled" else 1)
    expected = expected_active(same_as(names).probabilities, in_service)
    assert plan["expected_active"] == pytest.approx(expected)
    assert plan["inputs"]["popularity_source"] == popularity


def test_ranks_of_the_popularity_are_the_adapters_unless_given(trace: Path) -> None:
    words = ("--adapters", "50", "--popularity", "loraserve:uniform")
    mixed = planned(trace, *words)["inputs"]["lora_ranks"]
    assert mixed == [[rank, pytest.approx(0.2)] for rank in (8, 16, 32, 64, 128)]
    assert planned(trace, *words, "--lora-rank", "8")["inputs"]["lora_ranks"] == [[8, 1.0]]


def test_computation_counts_ranks_by_requests_and_memory_by_the_larger_mean(trace: Path) -> None:
    words = ("--adapters", "100", "--popularity", "loraserve:power:3")
    plan = planned(trace, *words)
    mean_rank = sum(rank * share for rank, share in plan["inputs"]["lora_ranks"])
    assert mean_rank == pytest.approx(11.1, abs=0.05)
    adapters = planned(trace, *words, "--lora-rank", "48")["bytes_per_adapter"]
    assert plan["bytes_per_adapter"] > adapters  # all the 100 have a mean of 49.6


def test_functions_stand_for_adapters(trace: Path, tmp_path: Path) -> None:
    functions = tmp_path / "functions.csv"
    rows = [f"app,f{index % 3},{index}.5,0.5" for index in range(12)] + ["app,f0,20,0.5"] * 6
    functions.write_text("\n".join(["app,func,end_timestamp,duration", *rows]) + "\n")
    plan = planned(trace, "--adapters", "2", "--popularity", f"functions:2:{functions}")
    assert plan["expected_active"] == pytest.approx(expected_active([14 / 18, 4 / 18], plan["global_batch"]))


def test_formats_of_the_options_are_those_that_are_read() -> None:
    assert set(OPTION_FORMATS) == set(FORMATS)


def test_requests_of_the_trace_for_the_base_model_take_no_slot(tmp_path: Path) -> None:
    rows = [{"adapter": f"a{i % 40}"} if i % 4 == 0 else {} for i in range(400)]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    mixed = planned(trace, "--global-batch", "200")
    alone = planned(write_trace(tmp_path / "a.jsonl", [row for row in rows if row]), "--global-batch", "50")
    assert mixed["inputs"]["adapter_share"] == 0.25
    assert mixed["capacity"] == alone["capacity"]
    assert mixed["iar_corrected"] == pytest.approx(alone["iar_corrected"], abs=1e-3)
    assert "75.0% of the requests ask for the base model" in " ".join(mixed["assumptions"])


def test_rate_of_the_trace_is_the_default_and_can_be_replaced(trace: Path) -> None:
    assert planned(trace, "--adapters", "8")["inputs"]["rate_per_s"] == pytest.approx(10)
    assert planned(trace, "--adapters", "8", "--request-rate", "20")["rate_per_s"] == pytest.approx(20)
    assert planned(trace, "--adapters", "8", "--global-batch", "77")["global_batch"] == 77
    assert planned(trace, "--adapters", "8", "--peak")["inputs"]["rate_per_s"] >= 10


def test_a_global_batch_is_the_load_whatever_the_traces_rate(tmp_path: Path) -> None:
    plans = [
        planned(
            write_trace(tmp_path / f"{gap_s}.jsonl", [{"arrival_s": i * gap_s} for i in range(100)]),
            *("--adapters", "8", "--global-batch", "30"),
        )
        for gap_s in (0.001, 1.0)
    ]
    for plan in plans:
        assert plan["rate_per_s"] == pytest.approx(30 / (200 * plan["tpot_s"]))
        assert plan["inputs"]["rate_per_s"] is None
    shown = run(tmp_path / "1.0.jsonl", "--adapters", "8", "--global-batch", "30").stdout
    assert f"with prompts at {plans[1]['rate_per_s']:.4g} requests/s, using" in shown
    fast, slow = ({name: plan[name] for name in ("total_gpus", "prompt_share", "tpot_s")} for plan in plans)
    assert fast == slow
    assert fast["prompt_share"] > 0


def test_mix_of_ranks_and_shared_form(trace: Path) -> None:
    mix = planned(trace, "--adapters", "8", "--lora-rank", "8=0.5", "--lora-rank", "64=0.5")
    assert mix["inputs"]["lora_ranks"] == [[8, 0.5], [64, 0.5]]
    form = planned(trace, "--adapters", "8", "--adapter-form", "shared", model="qwen3-30b-a3b")
    assert form["bytes_per_adapter"] == pytest.approx(2.517e9, rel=0.001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --adapters N"),
        (["--zipf", "1.0"], "--zipf needs --adapters"),
        (["--popularity", "long-tail"], "no adapter to choose from"),
        (["--popularity", "oval", "--adapters", "8"], "'oval' is neither a file nor known"),
        (["--popularity", "uniform", "--zipf", "1", "--adapters", "8"], "exclude each other"),
        (["--adapters", "8", "--zipf", "-1"], "zipf=-1.0 is not allowed"),
        (["--adapters", "8", "--slo-tpot-s", "-1"], "slo_tpot_s=-1.0 must be positive and finite"),
        (["--adapters", "8", "--slo-ttft-s", "nan"], "slo_ttft_s=nan"),
        (["--adapters", "8", "--target-iar", "1.2"], "target_iar=1.2"),
        (["--adapters", "8", "--gpus", "-2"], "-2 is not in the range x>=1"),
        (["--adapters", "8", "--gpus", "8", "--instances", "2"], "give one"),
        (["--adapters", "8", "--hardware", "abacus"], "shipped are h200, hopper96"),
        (["--adapters", "8", "--lora-rank", "big"], "'big' is not R or R=SHARE"),
        (["--adapters", "8", "--lora-rank", "8=0.5"], "must sum to 1"),
        (["--adapters", "8", "--format", "xml"], "'xml' is not one of 'azure'"),
        (["--adapters", "8", "--peak", "--request-rate", "3"], "give it or --request-rate"),
        (["--adapters", "8", "--global-batch", "9", "--peak"], "--global-batch is the load; leave"),
        (["--adapters", "8", "--global-batch", "9", "--request-rate", "3"], "is the load; leave"),
        (["--adapters", "8", "--instance-gpus", "0"], "instance_gpus=0 must be"),
        (["--adapters", "8", "--load-margin", "-1"], "load_margin=-1.0"),
        (
            ["--adapters", "8", "--load-margin", "0.2", "--global-batch", "9"],
            "give load_margin or global_batch",
        ),
        (["--adapters", "8", "--instance-gpus", "3"], "3 does not divide num_experts=8"),
        (["--adapters", "8", "--prefix-hit-share", "1"], "prefix_hit_share=1.0 must be 0 or more, and less"),
        (["--adapters", "8", "--prefix-hit-share", "nan"], "prefix_hit_share=nan"),
        (["--adapters", "8", "--assume", "net_bytes_per_s"], "is not RATE=BYTES_PER_S"),
        (["--adapters", "8", "--assume", "speed=3"], "assumed rate 'speed' is unknown"),
        (["--adapters", "8", "--assume", "net_bytes_per_s=3"], "has net_bytes_per_s=5e+10"),
        (
            ["--adapters", "8", "--hardware", "h200", "--assume", "net_bytes_per_s=-3"],
            "must be finite and above",
        ),
    ],
)
def test_what_can_not_be_is_refused_with_status_2(trace: Path, arguments: list[str], message: str) -> None:
    result = run(trace, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo-tpot-s", "0.001"], "alone take"),
        (["--gpus", "1"], "--gpus 1 is less than an instance's --instance-gpus 2; give more --gpus"),
        (["--gpus", "2", "--request-rate", "80"], "Nor does a LoRA Server: --gpus 2: no split"),
        (["--slo-ttft-s", "0.01"], "which take the base model alone"),
    ],
)
def test_load_that_nothing_holds_is_refused_with_status_1_and_no_file(
    trace: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "plan.yaml"
    result = run(trace, "--adapters", "8", "--out", str(out), *arguments)
    assert result.exit_code == 1, result.output
    first = result.output.splitlines()[0]
    assert first.startswith("Error: no plan holds this load: ")
    assert message in first
    assert not out.exists()


def test_plan_that_misses_its_check_says_so_first_and_is_not_written(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Checked by another trace than it was made for: eight times the answers.
    written, verified = tmp_path / "plan.yaml", provision_result.verified
    longer = read_trace(write_trace(tmp_path / "longer.jsonl", [{"output_tokens": 1600} for _ in range(100)]))
    monkeypatch.setattr(provision_result, "verified", lambda inputs, plan, _: verified(inputs, plan, longer))
    words = ("--adapters", "512", "--zipf", "0.6", "--request-rate", "20", "--verify")
    result = run(trace, *words, "--out", str(written))
    assert result.exit_code == 1, result.output
    assert result.stdout.splitlines()[0].startswith("This plan does not hold its own check: ")
    assert "was not written" in result.output
    assert not written.exists()
    content = json.loads(run(trace, *words, "--json").stdout)
    assert content["held"] is False


@pytest.fixture(scope="module")
def verified_plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What a verified plan prints, its JSON, and the file that is written."""
    folder = tmp_path_factory.mktemp("verified")
    trace, out = write_trace(folder / "trace.jsonl", [{} for _ in range(100)]), folder / "plan.yaml"
    words = ("--adapters", "64", "--verify", "--prefix-hit-share", "0.3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed, "NUM_REQUESTS", FEW)
        result = run(trace, *words, "--out", str(out))
        assert result.exit_code == 0, result.output
        return result.output, planned(trace, *words), out


def test_verified_plan_is_shown_as_it_was_checked(verified_plan: tuple[str, dict[str, Any], Path]) -> None:
    output, content, out = verified_plan
    assert out.exists()
    assert "Checked by other draws, the trace's own arrivals" in output
    for target in ("At once, at least 95.00%: held", "P95 TTFT, at most 2.000 s: held", "Mean TPOT, at most"):
        assert target in output
    assert content["held"] is True
    assert {one["arrivals"] for one in content["verified"]} == {"trace", "poisson"}
    assert {one["target"] for one in content["verdicts"]} == {"target_iar", "slo_ttft_s", "slo_tpot_s"}


def test_verified_plan_is_shown_on_both_simulators(verified_plan: tuple[str, dict[str, Any], Path]) -> None:
    output, content, _ = verified_plan
    names = ["provision.replayed", "moe_lora.sim"]
    assert [one["simulator"] for one in content["simulators"]] == names
    assert all(one["in_slo"] > 0.9 and one["p50_ttft_s"] > 0 for one in content["simulators"])
    heading = f"provision.replayed and moe_lora.sim, Poisson arrivals of the plan's rate ({FEW} requests):"
    for text in (heading, "P99 TTFT", "within SLOs", "does not replay", "the stated 30.0% are one prefix"):
        assert text in output
    assert [output.count(f"\n{name:<20}") for name in names] == [1, 1]


def test_interrupt_of_the_second_simulator_leaves_plan_and_check(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_simulators, "Replicas", interrupted)
    out = tmp_path / "plan.yaml"
    result = run(trace, "--adapters", "64", "--verify", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("GPUs in all")
    assert "Targets (within" in result.output
    assert f"moe_lora.sim: Ctrl-C stopped the replay of {FEW} requests" in result.output
    assert out.exists()


def test_interrupt_of_the_check_leaves_the_plan_and_no_file(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision_result, "replays", interrupted)
    out = tmp_path / "plan.yaml"
    # The search calls its own name.
    result = run(trace, "--adapters", "64", "--verify", "--out", str(out))
    assert result.exit_code == 1
    first, second, *_ = result.output.splitlines()
    assert first == "This plan was not checked: Ctrl-C stopped the check"
    assert second.startswith("GPUs in all")
    assert not out.exists()


def interrupted(*arguments: Any, **more: Any) -> None:
    raise KeyboardInterrupt


def test_answer_comes_first_and_the_assumed_rank_is_said(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    result = run(trace, "--adapters", "64", "--out", str(out))
    assert "GPUs in all" in result.output.splitlines()[0]
    kind = r"of hopper96: \d+ instances? of 2 GPUs, with \d+ adapters on each$"
    assert re.search(kind, result.output.splitlines()[0])
    assert "LoRA rank 64, the usual one of Mixtral-8x7B" in result.output
    assert "LoRA rank 16, as given" in run(trace, "--adapters", "64", "--lora-rank", "16").output
    text = out.read_text()
    assert "# Model: Mixtral-8x7B.  Adapters: 64 of LoRA rank 64, 1.81 GB each" in text
    assert "lora_memory_gb: " in text
    assert "kv_cache_gb: " in text
    engine = read_cluster(out).engine
    assert engine.max_num_seqs % 8 == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the trace is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in the trace"),
        ("a,b\n1,2\n", "unknown trace format"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04,5,5\n2023-11-16 18:17:03,5,5\n",
            "line 3: goes back in time by 1 s",
        ),
    ],
)
def test_bad_traces_are_refused_with_status_2(tmp_path: Path, content: str, message: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(content)
    result = run(trace, "--adapters", "8")
    assert result.exit_code == 2
    assert message in result.output


def test_trace_at_one_moment_needs_a_rate(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [{"arrival_s": 0.0}] * 5)
    result = run(trace, "--adapters", "8")
    assert result.exit_code == 2
    assert "give --request-rate or --global-batch" in result.output
    assert run(trace, "--adapters", "8", "--request-rate", "3").exit_code == 0


def test_unknown_model_is_refused_and_a_folder_needs_a_rank(trace: Path) -> None:
    assert "known are GPT-OSS-20B" in run(trace, "--adapters", "8", model="GPT-5").output
    result = run(trace, "--adapters", "8", model=str(ROOT / "demo" / "model"))
    assert result.exit_code == 2
    assert "give --lora-rank" in result.output


def test_planning_never_imports_torch(trace: Path) -> None:
    program = (
        "import sys\nfrom moe_lora.cli.main import main\nfrom moe_lora.provision.plan import verify\n"
        f"verify.NUM_REQUESTS = {FEW}\n"
        f"try:\n    main(['provision', '--trace', {str(trace)!r}, '--model', 'DBRX', '--adapters', '9'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_readmes_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("moe-lora provision")]
    words = [word.replace("demo/trace.csv", str(ROOT / "demo" / "trace.csv")) for word in line.split()[1:]]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replayed, "NUM_REQUESTS", 3_000)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert read_cluster("plan.yaml").engine.max_num_batched_tokens < 2048
    assert (tmp_path / "plan.html").is_file()
    total, bound = (
        int(re.search(rf"^{name} +(\d+)", result.output, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("GPUs in all", "Lower bound")
    )
    assert f"answers {total} GPUs, beside a lower bound of {bound} at peak rates" in text
    assert total >= bound >= 70  # 400,000 prompt tokens/s of 26 GFLOP each, at 148 TFLOP/s


def test_files_that_cant_be_written_are_refused_before_planning(trace: Path, tmp_path: Path) -> None:
    missing, same = trace / "plan.yaml", tmp_path / "plan"
    for options, words in (
        (("--out", str(missing)), "there is no folder"),
        (("--out", str(same), "--report", str(same)), "--out and --report are the same file"),
    ):
        result = run(trace, "--adapters", "64", *options)
        assert result.exit_code == 2
        assert words in result.output
    assert not same.exists()
