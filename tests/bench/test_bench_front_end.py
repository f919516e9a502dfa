# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tiny_run_counts_every_token_of_both_trees(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    options = ["--before", str(ROOT), "--keys", "--out", str(out)]
    options += ["--streams", "2", "--steps", "5", "--rounds", "1", "--starts", "2"]
    subprocess.run([sys.executable, "-m", "bench.serve.bench_front_end", *options], check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["kind"] == "measured"
    assert len(record["result"]["now_over_before"]["starts"]) == 2
    assert len(record["result"]["cpu_us_per_token_rounds"]["now"]) == 2
