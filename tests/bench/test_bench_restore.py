# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_both_ways_restore_the_bits_and_say_what_they_keep(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "bench.dlora.bench_restore",
        "--quick",
        "--rounds",
        "1",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["config"]["dtype"] for record in records] == ["torch.bfloat16", "torch.float32"]
    for record in records:
        result = record["result"]
        assert result["bytes_kept_bytes"] == result["changed_bytes"]
        assert 0 < result["residual_kept_bytes"] < result["changed_bytes"]
        assert result["rounding"]["1/256"] > result["rounding"]["1/1"] > 0
