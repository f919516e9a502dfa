# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tiny_run_compares_two_trees(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    options = ["--quick", "--before", str(ROOT), "--quantize", "int8", "--steps", "4", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "bench.serve.bench_decode", *options], check=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["config"]["streams"] for record in records] == [1, 8, 16]
    assert all(record["result"]["before_over_now"]["median"] > 0 for record in records)
