# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the LoRA kernels: does it run, does it refuse what is wrong, do its records agree?"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from bench.kernels import vllm_peer
from bench.kernels.bench_lora_kernels import CPU_MEMORY_BYTES, DEFAULT_SCALE, main, refuse_too_large
from bench.kernels.lora_kernel_cases import Case, memory_bytes, num_copies, routing, work
from bench.kernels.lora_kernel_clock import COLD_BYTES
from bench.kernels.lora_kernel_peers import NotApplicable, add_rows, both, load_peer, mm_loop, torch_peers
from bench.kernels.lora_kernel_plan import PHASES, TINY, CaseSpec, plan, scaled
from bench.kernels.lora_kernel_report import verdict_table, verdicts
from bench.kernels.lora_kernel_runs import check
from moe_lora.kernels import reference
from moe_lora.report.results import read_results

CPU = torch.device("cpu")
PEER = """
from bench.kernels.lora_kernel_peers import mm_loop

NAME = "outsider"

def prepare(case):
    return mm_loop(case)["delta"]
"""
WRONG_PEER = """
def prepare(case):
    return lambda copy: case.y[copy].add_(1.0)
"""


def spec_of(shape_number: int = 0, **changes: object) -> CaseSpec:
    spec = CaseSpec(
        group="decode",
        shape=TINY[shape_number],
        num_rows=10,
        num_adapters=5,
        popularity="uniform",
        lora_ranks=(8, 3, 16),
        dtype=torch.float32,
        phases=PHASES,
    )
    return replace(spec, **changes)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], str]:
    folder = tmp_path_factory.mktemp("lora")
    out = folder / "out.jsonl"
    arguments = ["--tiny", "--device", "cpu", "--out", str(out)]
    for name, text in (("outsider", PEER), ("wrong", WRONG_PEER)):
        (folder / f"{name}.py").write_text(text)
        arguments += ["--peer-module", str(folder / f"{name}.py")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return read_results(out), done.output


@pytest.mark.slow
def test_each_phase_of_a_case_has_every_contestant(output: tuple[list[dict], str]) -> None:
    records, _ = output
    own, peers = {"our sgmv", "our mbgmv", "our bgmv"}, {"mm loop", "gather + bmm", "grouped_mm"}
    for spec in plan("tiny", torch.bfloat16, 1).specs:
        for phase in spec.phases:
            found = {
                r["config"]["kernel"]
                for r in records
                if (r["config"]["case"], r["config"]["phase"]) == (spec.title, phase)
                and "refused" not in r["result"]
            }
            assert found == own | peers | ({"outsider"} if phase == "delta" else set())


@pytest.mark.slow
def test_a_wrong_contestant_is_refused_and_named(output: tuple[list[dict], str]) -> None:
    records, text = output
    wrong = [r["result"] for r in records if r["config"]["kernel"] == "wrong"]
    assert len(wrong) == len(plan("tiny", torch.bfloat16, 1).specs)
    assert all(set(result) == {"refused"} and result["refused"].startswith("wrong:") for result in wrong)
    assert "WRONG  wrong" in text


@pytest.mark.slow
def test_records_agree_with_themselves(output: tuple[list[dict], str]) -> None:
    for record in output[0]:
        config, result = record["config"], record["result"]
        assert record["env"]["device_name"] == "cpu"
        if "refused" in result:
            continue
        seconds = result["time_ms"] / 1e3
        assert result["num_pairs"] == len(result["time_ms_rounds"]) > 0
        assert result["bytes_per_s"] == pytest.approx(result["min_bytes"] / seconds)
        assert result["flops_per_s"] == pytest.approx(result["flops"] / seconds)
        assert result["of_bound"] == result["of_gemm" if result["bound"] == "compute" else "of_read"]
        assert result["relative_error"] < 1e-2
        assert ("speedup_over" in result) == (config["role"] == "ours")
        if config["role"] == "ours":
            assert result["outside"] == (["outsider"] if config["phase"] == "delta" else [])
        assert config["timed_by"] == "wall time"


@pytest.mark.slow
def test_summary_answers_the_goals_of_the_device(output: tuple[list[dict], str]) -> None:
    records, text = output
    assert {verdict.goal.device for verdict in verdicts(records)} == {"cpu"}
    assert "8 adapters of 1-4 rows" in text


def test_summary_says_how_far_a_goal_was_missed() -> None:
    config = {"device": "cuda", "role": "ours", "group": "figure19", "phase": "shrink", "case": "a case"}
    result = {"bound": "memory", "of_copy": {"median": 0.68}}
    text = verdict_table([{"config": {**config, "equal_ranks": True}, "result": result}])
    assert "MISSED figure 19, memory-bound: share of copy bandwidth >= 0.85: 0 of 1" in text
    assert "worst 0.68 (-20%): a case, shrink" in text
    assert "OPEN   prefill" in text


@pytest.mark.parametrize("outside", [[], ["vllm"]])
def test_goal_over_peers_is_open_without_kernels_from_outside(outside: list[str]) -> None:
    config = {"device": "cuda", "role": "ours", "group": "decode", "phase": "delta", "case": "a case"}
    speedups = {name: {"median": 2.5} for name in ["mm loop", *outside]}
    result = {"bound": "memory", "speedup_over": speedups, "outside": outside}
    text = verdict_table([{"config": {**config, "equal_ranks": False}, "result": result}])
    goal = "mixed ranks: times the best peer's speed, --peer-module included >= 2"
    assert f"{'met   ' if outside else 'OPEN  '} {goal}" in text


@pytest.mark.parametrize("shape_number", range(len(TINY)))
def test_operands_mean_what_the_reference_computes(shape_number: int) -> None:
    case = Case(spec_of(shape_number), CPU, 0)
    for copy in range(case.num_copies):
        expected = reference.lora_delta(case.operands(copy))
        mm_loop(case)["delta"](copy)
        torch.testing.assert_close(case.y[copy], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(case.exact, case.y[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape_number", range(len(TINY)))
def test_torch_peers_are_right_where_they_apply(shape_number: int) -> None:
    case = Case(spec_of(shape_number, dtype=torch.bfloat16, lora_ranks=(8, 16)), CPU, 0)
    errors = [check(case, peer.phases(case)) for peer in torch_peers()]
    assert max(errors) < 1e-2


@pytest.mark.parametrize("shape_number", [0, 1])
@pytest.mark.parametrize("block", [2, 16])
def test_blocks_of_rows_for_vllm_are_of_one_adapter_and_expert(shape_number: int, block: int) -> None:
    case = Case(spec_of(shape_number), CPU, 0)
    num_rows, top_k = len(case.order), case.spec.shape.top_k
    sorted_rows, experts, lengths = vllm_peer.blocks_of(case, block)
    found = []
    for slot, length in enumerate(lengths.tolist()):
        assert sorted_rows[slot, length:].eq(num_rows).all()
        assert experts[slot, length // block :].eq(-1).all()
        for number, rows in enumerate(sorted_rows[slot, :length].split(block)):
            held = rows[rows < num_rows].tolist()
            assert len(held) > 0
            assert {int(case.token_slots[row // top_k]) for row in held} == {slot}
            assert {int(case.ids.flatten()[row]) for row in held} == {int(experts[slot, number])}
            found += held
    assert sorted(found) == list(range(num_rows))


def test_matrices_for_vllm_give_the_exact_delta() -> None:
    case = Case(spec_of(lora_ranks=(4, 8)), CPU, 0)
    matrices_a, matrices_b = vllm_peer.stacked(case, 0)
    top_k, found = case.spec.shape.top_k, torch.zeros_like(case.exact)
    for row, expert in enumerate(case.ids.flatten().tolist()):
        slot = int(case.token_slots[row // top_k])
        x = case.x[0][row // top_k].float()
        parts = [
            b[slot, expert].float() @ (a[slot, expert].float() @ x)
            for a, b in zip(matrices_a, matrices_b, strict=True)
        ]
        found[row] = torch.cat(parts)
    torch.testing.assert_close(found, case.exact, rtol=1e-4, atol=1e-5)


def test_vllms_file_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(click.ClickException, match="put vLLM's file there"):
        vllm_peer.prepare(Case(spec_of(), CPU, 0))
    with pytest.raises(NotApplicable, match="for experts"):
        vllm_peer.prepare(Case(spec_of(2), CPU, 0))


def test_rows_are_added_in_either_way() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 2.0):
        index, delta = torch.randperm(40, generator=generator)[:17], torch.randn(17, 6)
        y = torch.ones(40, 12)
        expected = y.clone()
        expected[index, 6:] += scale * delta
        add_rows(y[:, 6:], index, delta, scale)
        torch.testing.assert_close(y, expected)


def test_check_refuses_half_a_delta_and_nan() -> None:
    case = Case(spec_of(), CPU, 0)
    phases = mm_loop(case)
    with pytest.raises(NotApplicable, match="wrong"):
        check(case, both(phases["shrink"], lambda copy: None))
    with pytest.raises(NotApplicable, match="wrong"):
        check(case, {"delta": lambda copy: case.y[copy].fill_(float("nan"))})
    with pytest.raises(NotApplicable, match="needed"):
        check(case, {"shrink": phases["shrink"]})


def test_bytes_and_flops_of_a_batch_by_hand() -> None:
    # Two rows of two adapters of ranks 8 and 16 at a dense site 64 -> 3 x 32, fp32.
    spec = spec_of(2, num_rows=2, num_adapters=2, lora_ranks=(8, 16))
    found = work(spec)
    a, b, x, y, between = 24 * 3 * 64 * 4, 24 * 96 * 4, 2 * 64 * 4, 2 * 96 * 4, 24 * 3 * 4
    assert found.bytes == {
        "shrink": a + x + between,
        "expand": b + between + 2 * y,
        "delta": a + b + x + 2 * y,
    }
    assert found.flops["delta"] == 2 * 24 * (3 * 64 + 96)


def test_only_touched_pairs_have_memory_and_a_rank() -> None:
    spec = spec_of(0, num_rows=3)
    case = Case(spec, CPU, 0)
    touched = {(slot, entry) for slot, _, entry in (case.slots.lora_rank > 0).nonzero().tolist()}
    modules = range(len(case.site.modules))
    assert touched == {(slot, case.site.entry(m, expert)) for slot, expert in case.pairs for m in modules}
    assert len(case.pairs) == len(routing(spec).pairs) <= 6


def test_a_measured_phase_passes_enough_memory_before_it_meets_a_matrix_again() -> None:
    spec = spec_of(2)
    smallest = min(work(spec).matrix_bytes[phase] for phase in spec.phases)
    assert num_copies(spec, 7 * smallest - 1) == 7
    assert num_copies(spec, 0) == 2


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_default_plan_on_cpu_fits_its_memory(mode: str) -> None:
    specs = plan(mode, torch.bfloat16, DEFAULT_SCALE["cpu"]).specs
    assert max(memory_bytes(spec, COLD_BYTES["cpu"]) for spec in specs) <= CPU_MEMORY_BYTES


def test_too_large_cases_are_refused_by_name() -> None:
    specs = plan("full", torch.bfloat16, 1).specs
    with pytest.raises(ValueError, match=r"figure19 mixtral-8x7b gate_up.*Raise --scale"):
        refuse_too_large(specs, COLD_BYTES["cpu"], CPU_MEMORY_BYTES)


def test_scale_divides_rows_and_adapters_of_large_cases_only() -> None:
    figure19 = next(s for s in plan("full", torch.bfloat16, 1).specs if s.group == "figure19")
    assert (figure19.num_rows, figure19.num_adapters) == (1024, 512)
    small = scaled(figure19, 16)
    assert (small.num_rows, small.num_adapters, small.scale) == (64, 32, 16)
    assert small.lora_ranks == figure19.lora_ranks
    assert scaled(spec_of(), 16) == spec_of()
    with pytest.raises(ValueError, match="scale=0"):
        plan("full", torch.bfloat16, 0)


def test_peer_module_without_prepare_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("")
    with pytest.raises(ValueError, match="has no prepare"):
        load_peer(path)
    with pytest.raises(ValueError, match="not a readable"):
        load_peer(tmp_path / "absent.py")


INTERPRETED = """
import torch
from bench.kernels.lora_kernel_cases import Case
from bench.kernels.lora_kernel_own import gpu_phases
from bench.kernels.lora_kernel_runs import check
from tests.bench.test_lora_kernels import spec_of

case = Case(spec_of(2, num_rows=2, lora_ranks=(8,), dtype=torch.bfloat16), torch.device("cpu"), 0)
for kernel, more in (("sgmv", {}), ("mbgmv", {}), ("bgmv", {}), ("sgmv", {"algorithm": "wgmma"})):
    options = {"kernel": kernel, **more}
    check(case, gpu_phases(options)(case))
"""


@pytest.mark.slow
def test_our_gpu_kernels_are_wired_as_contestants() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
