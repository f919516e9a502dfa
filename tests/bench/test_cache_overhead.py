# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys


def test_small_run_measures_what_it_says(tmp_path):
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "bench.cache.bench_cache_overhead",
        "--nodes",
        "500",
        "--requests",
        "100",
    ]
    subprocess.run([*command, "--policies", "fastlibra", "--out", str(out)], check=True, capture_output=True)
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    result = record["result"]
    assert record["config"]["policy"] == "fastlibra"
    assert result["num_nodes"] > 500
    assert result["refused"] == 0
    assert 0 < result["num_resident_requests"] <= 100
    for name in ("match_update_us", "decision_us", "decision_of_all_us"):
        assert result[name] > 0
