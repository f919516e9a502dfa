# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bench.engine.bench_load import FULL, main, shapes


@pytest.mark.slow
def test_a_quick_run_loads_both_checkpoints_and_deletes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    arguments = [
        "--folder",
        str(tmp_path / "files"),
        "--out",
        str(tmp_path / "o.jsonl"),
        "--rounds",
        "1",
        "--quick",
    ]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [record["config"]["checkpoint"] for record in records] == ["bfloat16", "fp8"]
    plain, coded = (record["result"]["weight_bytes"] for record in records)
    assert coded < plain
    assert not list((tmp_path / "files").iterdir())


def test_the_full_checkpoints_have_the_experts_of_a_30b():
    for size in FULL.values():
        names = [name for name, _ in shapes(size)]
        assert sum(".experts." in name for name in names) == 48 * 128 * 3
        assert len(names) == len(set(names)) == 48 * (128 * 3 + 9) + 3
