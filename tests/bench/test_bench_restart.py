# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_one_kill_is_recorded_in_parts_that_add_up(tmp_path):
    out = tmp_path / "out.jsonl"
    options = ["--eager", "--kills", "1", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "bench.cluster.bench_restart", *options], check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    result = record["result"]
    parts = [
        result[f"{part}_s"] for part in ("keeper", "imports", "weights_and_adapters", "compile", "dial_in")
    ]
    assert abs(sum(parts) - result["whole_s"]) < 0.01
    assert min(parts) >= 0
