# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_tiny_run_compares_streams_with_a_grammar_and_without(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    options = ["--quick", "--quantize", "int8", "--streams", "2", "--steps", "4", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "bench.serve.bench_masks", *options], check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["config"]["streams"] == 2
    assert record["result"]["grammar_over_plain"]["median"] > 0
