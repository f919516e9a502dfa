# SPDX-License-Identifier: Apache-2.0
"""The bench of 256 instances runs, and its changes don't grow with the adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_quick_bench_measures_changes_and_every_router(tmp_path: Path) -> None:
    out = tmp_path / "scale.jsonl"
    command = [sys.executable, "-m", "bench.cluster.bench_scale", "--quick", "--out", str(out)]
    env = {**os.environ, "MOE_LORA_BENCH_ALLOW_DIRTY": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = {one["config"]["what"]: one["result"] for one in map(json.loads, out.read_text().splitlines())}
    changes = found.pop("changes")
    assert changes["change_bytes"] < 500 < 50_000 < changes["state_bytes"]
    assert {"least_outstanding", "phi"} < found.keys()
    assert all(one["p50_us"] > 0 for one in found.values())
