# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_small_run_writes_a_record_for_everything_timed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "bench.cluster.bench_registry",
        "--num-adapters",
        "200",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True)
    records = {one["config"]["what"]: one["result"] for one in map(json.loads, out.read_text().splitlines())}
    assert set(records) == {
        "add, first",
        "add, between",
        "add, last",
        "get",
        "resolve",
        "list",
        "page",
        "open",
    }
    assert records["list"]["num_listed"] == 200
    assert all(result["own_s"] > 0 for result in records.values())
