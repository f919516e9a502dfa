from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.bench_placement import methods


def test_small_run_judges_every_method(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "bench.bench_placement", "--popularities", "shifting", "--sizes", "25x4"]
    subprocess.run(
        [*command, "--num-exact", "2", "--cost-size", "200x4", "--out", str(out)], check=True, timeout=300
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    names = set(methods({}))
    for part, times in (("quality", 4), ("cost", 1)):
        found = [record["config"]["method"] for record in records if record["config"]["part"] == part]
        assert sorted(found) == sorted([*names] * times)
    known = {
        record["config"]["method"]: record["result"]
        for record in records
        if record["config"].get("forecast") is False and record["config"]["points"] == "tp1"
    }
    assert known["optimal_no_slack"]["worst_padded_load_over_optimum"] < 1 + 1e-6
    assert all(result["worst_padded_load_over_optimum"] > 1 - 1e-6 for result in known.values())
    assert known["optimal_bounded"]["copied_share_per_step"] <= 0.05
    assert known["everywhere"]["mean_held"] == 25
