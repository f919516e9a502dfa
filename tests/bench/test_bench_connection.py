# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_tiny_run_counts_every_output_on_both_paths(tmp_path):
    out = tmp_path / "out.jsonl"
    options = ["--streams", "4", "--steps", "20", "--rounds", "2", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "bench.cluster.bench_connection", *options], check=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["kind"] == "measured"
    assert record["result"]["old"] > 0
    assert record["result"]["new_over_old"]["num_pairs"] == 2
