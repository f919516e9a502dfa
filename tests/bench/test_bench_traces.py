# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.workload.bench_traces import FORMATS, write_trace
from moe_lora.workload.traces.traces import detect_format, iter_trace


@pytest.mark.parametrize("name", FORMATS)
def test_generated_file_is_of_its_format_and_read_whole(tmp_path: Path, name: str) -> None:
    write_trace(tmp_path / "t", name, 300)
    assert detect_format(tmp_path / "t") == name
    assert sum(1 for _ in iter_trace(tmp_path / "t")) == 300


@pytest.mark.parametrize("prompt", [511, 512, 513, 1024])
def test_mooncake_rows_have_a_hash_id_for_each_block(tmp_path: Path, prompt: int) -> None:
    (tmp_path / "t").write_text(FORMATS["mooncake"][1](0.0, prompt, 1))
    assert [len(one.hash_ids) for one in iter_trace(tmp_path / "t")] == [(prompt + 511) // 512]


def test_small_run_writes_a_record_for_each_way_of_reading(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "bench.workload.bench_traces",
        "--num-lines",
        "500",
        "--formats",
        "azure",
    ]
    subprocess.run([*command, "--out", str(out)], check=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["config"]["system"] for record in records] == ["iter_trace", "trace_statistics", "pairs"]
    assert records[0]["result"]["num_requests"] == 500
    assert records[0]["result"]["peak_rss_bytes"] > 0
    assert records[2]["result"]["share_of_bare"]["num_pairs"] == 7
