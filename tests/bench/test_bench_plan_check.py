# SPDX-License-Identifier: Apache-2.0
"""The check of plans over five models: its cells, and how it goes on after it was cut short."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from bench.provision import bench_plan_check
from bench.provision.bench_plan_check import cells, summary

ROOT = Path(__file__).parents[2]
PLAN = {"kind": "coupled", "layout": "EP1-PP1", "total_gpus": 3}


def result(**changes: object) -> dict[str, object]:
    return {
        "plan": PLAN,
        "held": True,
        "held_strictly": True,
        "excess_gpus": 0,
        "wrongly_refused": False,
        "plan_s": 1.0,
        "search_s": 1.0,
        **changes,
    }


def test_cells_are_ninety_different_ones() -> None:
    found = [json.dumps(cell) for cell in cells()]
    assert len(found) == len(set(found)) == 90


def test_both_kinds_of_error_are_counted() -> None:
    lines = summary(
        [
            result(),
            result(held=False, held_strictly=False),
            result(excess_gpus=1),
            result(excess_gpus=3),
            result(plan=None, excess_gpus=None, wrongly_refused=True),
        ]
    )
    text = "\n".join(lines)
    assert "5 cells: 4 plans, 1 refused" in text
    assert "held by 3 draws within 2 points and 10 %: 3 of 4" in text
    assert "more than 1 GPU above the smallest found: 1 (by 1: 1; most: 3)" in text
    assert "wrongly refused: 1 of 1" in text


def test_run_goes_on_with_the_next_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "plan_check.jsonl", []
    monkeypatch.setattr(
        bench_plan_check, "measure", lambda cell: asked.append(cell) or result(smallest_gpus=3)
    )
    monkeypatch.setattr(sys, "argv", ["bench_plan_check", "--out", str(out), "--cells", "1"])
    bench_plan_check.main()
    bench_plan_check.main()
    assert asked == list(islice(cells(), 2))
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.slow
def test_run_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    out = tmp_path / "plan_check.jsonl"
    for _ in range(2):
        command = [
            sys.executable,
            "-m",
            "bench.provision.bench_plan_check",
            "--out",
            str(out),
            "--cells",
            "1",
        ]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["config"] != second["config"]
    assert first["kind"] == "simulated"
    for record in (first, second):
        assert record["result"]["held"]
        assert 0 <= record["result"]["excess_gpus"] <= 1
