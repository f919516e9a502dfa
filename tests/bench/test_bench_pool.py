# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_quick_run_writes_a_record_for_every_way(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "bench.cluster.bench_pool", "--quick", "--out", str(out)]
    subprocess.run(command, check=True)
    records = {one["config"]["way"]: one["result"] for one in map(json.loads, out.read_text().splitlines())}
    ways = {f"{kind} {how}" for kind in ("shm", "gloo") for how in ("by layer", "whole")}
    assert set(records) == {"memcpy", "disk", *ways}
    assert all(result["seconds"] > 0 for result in records.values())
