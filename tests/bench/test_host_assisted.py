# SPDX-License-Identifier: Apache-2.0
"""The bench of host-assisted starts: its settings keep the paper's ratios, and it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.host_assisted.assisted_plan import ON_DEMAND, OURS, SYSTEMS, asks, settings, sweep
from bench.host_assisted.assisted_report import goals, lines
from bench.host_assisted.assisted_runs import Run
from bench.host_assisted.bench_host_parts import (
    SIZE,
    TOKENS_EACH,
    Served,
    SocketWorkers,
    by_frames,
    in_process,
)
from moe_lora.dist.host_workers.workers import HostWorkers


def test_settings_keep_the_papers_ratios() -> None:
    cells = {cell.name: cell for cell in settings()}
    assert cells["S1"].utilisation / cells["S2"].utilisation == pytest.approx(9 / 6)
    assert cells["S3"].load / cells["S1"].load == pytest.approx(64 / 32)
    assert cells["S6"].load / cells["S5"].load == pytest.approx(64 / 32)
    maf = [cells[f"MAF {n}"] for n in (128, 256, 512)]
    assert [c.num_adapters / maf[0].num_adapters for c in maf] == [1, 2, 4]
    assert maf[2].utilisation / maf[0].utilisation == pytest.approx(7.7 / 1.5)
    assert {cell.load / cells["S3"].load for cell in sweep()} == {0.25, 0.5, 1.0, 2.0, 4.0}


def test_some_prompts_are_divided_and_every_request_has_another_adapter() -> None:
    cell = next(cell for cell in settings() if cell.name == "S3")
    wanted = asks(cell, 0.035, 0)
    assert len({ask.adapter for ask in wanted}) == cell.num_requests
    lengths = [ask.num_prompt_tokens for number in range(7) for ask in asks(cell, 0.035, number)]
    assert 0 < sum(n > cell.mean_prompt for n in lengths) < len(lengths)
    assert max(lengths) <= 4 * cell.mean_prompt


def test_what_decoding_lasts_longer_is_the_interruption() -> None:
    def done(decode_s: float) -> dict[str, float]:
        run = Run([0.5, 0.5], [decode_s] * 2, [4, 4], [0.1], wall_s=2.0)
        return run.figures(Run([0.5, 0.5], [1.5] * 2, [4, 4], [0.1], wall_s=2.0))

    assert done(1.5)["interrupted"] == 0
    assert done(2.5)["interrupted"] == pytest.approx(1 / 3)
    rounds = {name: [done(1.5)] for name in SYSTEMS}
    record = {"config": {"name": "S3"}, "result": {"rounds": rounds | {ON_DEMAND: [done(2.5)]}}}
    assert [line["system"] for line in lines(record)] == list(SYSTEMS)
    found = goals([record])
    assert sum(line.endswith(": met") for line in found) == 6
    record["result"]["rounds"][OURS] = [done(1.8)]
    assert sum("over cached" in line and line.endswith("MISSED") for line in goals([record])) == 2


@pytest.mark.slow
def test_quick_run_writes_a_record_and_a_figure(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "figure.png"
    command = [sys.executable, "-m", "bench.host_assisted.bench_host_assisted", "--quick", "--part=sweep"]
    command += ["--part=pipelining", "--slack=4", f"--out={out}", f"--plot={plot}"]
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["kind"] for record in records} == {"emulated"}
    for record in records:
        assert record["result"]["lora_rows"]["host"] > 0
        assert record["result"]["lora_rows"]["fallback"] == 0
    rows = records[-1]["result"]["lora_rows"]
    assert rows["host_whole"] > rows["host"], "layers that serve one by one leave the host less"
    for record in records[:-1]:
        assert all(share <= 1 for share in record["result"]["engine_share_of_prompts"].values())
    assert plot.stat().st_size > 0


@pytest.mark.slow
def test_parts_are_timed_against_their_alternatives(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "bench.host_assisted.bench_host_parts", "--quick", f"--out={out}"]
    subprocess.run(command, check=True)
    found = {one["config"]["part"]: one["result"]["found"] for one in map(json.loads, out.open())}
    assert [one["num_workers"] for one in found["ipc"]] == [1, 2]
    assert {tuple(one["seconds"]) for one in found["ipc"]} == {
        ("shared memory", "UNIX socket", "all in process")
    }
    assert {"workers", "torch's threads", "CPU library, in process"} == set(found["threads"][0]["seconds"])


@pytest.mark.slow
def test_both_ways_to_a_worker_bring_the_adapters_deltas(tmp_path: Path) -> None:
    served = Served(tmp_path, lora_rank=8)
    x = torch.randn(2 * TOKENS_EACH, SIZE.hidden_size).bfloat16()
    expected, *others = (torch.zeros(len(x), 3 * SIZE.hidden_size, dtype=x.dtype) for _ in range(3))
    in_process(served, x)(expected)
    core = [max(os.sched_getaffinity(0))] * 2
    workers = HostWorkers(served.layout(TOKENS_EACH), served.store, 2, TOKENS_EACH, cores=core)
    sockets = SocketWorkers(served, 2, TOKENS_EACH, core)
    by_frames(workers, served, x, others[0])
    sockets.step(x, others[1])
    workers.close()
    sockets.close()
    assert expected.any()
    assert all(torch.equal(other, expected) for other in others)
