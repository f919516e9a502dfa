# SPDX-License-Identifier: Apache-2.0
"""The bench of performance models runs on a tiny model, and records what it says it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.provision.bench_performance_model import MIXES, PARTS, main
from moe_lora.report.results import read_results


@pytest.mark.slow
def test_every_part_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(main, ["--tiny", "--rounds", "1", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    records = read_results(out)
    of = {part: [r for r in records if r["config"]["part"] == part] for part in PARTS}
    assert {(r["config"]["kernel"], r["config"]["form"]) for r in of["models"]} == {
        (kernel, form) for kernel in ("sgmv", "bgmv", "mbgmv") for form in ("toppings", "full")
    }
    for record in of["models"]:
        assert record["result"]["quality"]["decode"]["num_held_out"] > 0
    assert [r["config"]["kernel"] for r in of["mixing"]] == ["sgmv", "bgmv", "mbgmv"]
    for record in of["mixing"]:
        assert set(MIXES) <= set(record["result"])
        assert record["result"]["all low"]["of_low_alone"]["median"] == 1
    kinds = [(r["config"]["kernel"], r["kind"]) for r in of["points"]]
    assert kinds == [("sgmv", kind) for kind in ("measured", "simulated")]
    for record in of["points"]:  # on a busy machine no rate may hold the SLO
        found = record["result"]
        assert set(found["operating_points"]) == {"8", "16"} or "the SLO" in found["problem"]


def test_points_alone_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--part", "points", "--out", str(tmp_path / "out.jsonl")])
    assert done.exit_code == 2
    assert "give --part models too" in done.output
