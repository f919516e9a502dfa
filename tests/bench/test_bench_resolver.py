# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_small_run_records_memory_times_and_hits(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    numbers = {"names": 3000, "requests": 100, "cold": 14, "resolved": 20, "rounds": 2}
    options = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    command = [sys.executable, "-m", "bench.serve.bench_resolver", *options, "--out", str(out)]
    subprocess.run(command, check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    result = record["result"]
    assert 0 < result["hit_rate"] < 1
    assert result["zipf"]["num_failed_before_kill"] == 0
    assert result["cold"]["median_ms"] > 0
    assert result["rss_mb_at_end"] > 0
