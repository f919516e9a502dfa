# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_tiny_run_asks_for_each_case(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    command = [sys.executable, "-m", "bench.serve.bench_fairness", "--quick", "--out", str(out)]
    subprocess.run(command, check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    at_share, at_ten, one_key = record["result"]["rows"]
    assert at_share["requests"] == at_ten["requests"] > one_key["requests"] > 0
    assert set(at_share["answers"]) == {"modest 200", "other 200"}
    assert at_ten["answers"]["other 429"] > 0
