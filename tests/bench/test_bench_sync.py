# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")
def test_tiny_run_syncs_in_three_ways(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    command = [sys.executable, "-m", "bench.serve.bench_sync", "--quick", "--out", str(out)]
    subprocess.run(command, check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    assert set(record["result"]["median_s"]) == {"tensors", "files", "merged"}
    assert record["result"]["files_over_tensors"]["num_pairs"] == 2
    assert record["result"]["bytes"]["adapter"] < record["result"]["bytes"]["model"]
