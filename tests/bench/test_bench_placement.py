# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.placement.bench_placement import methods


@pytest.mark.slow
def test_small_run_judges_every_method(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "bench.placement.bench_placement", "--quick", "--out", str(out)]
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    names = set(methods({}))
    quality = [record for record in records if record["config"]["part"] == "quality"]
    assert len(quality) == 4
    assert all(set(record["result"]) == names for record in quality)
    assert {r["config"]["method"] for r in records if r["config"]["part"] == "cost"} == names
    (known,) = (
        record["result"]
        for record in quality
        if record["config"]["forecast"] is False and record["config"]["points"] == "tp1"
    )
    assert known["optimal_no_slack"]["worst_padded_load_over_optimum"] < 1 + 1e-6
    assert all(result["worst_padded_load_over_optimum"] > 1 - 1e-6 for result in known.values())
    assert known["optimal_bounded"]["copied_share_per_step"] <= 0.05
    assert known["everywhere"]["mean_held"] == 25
