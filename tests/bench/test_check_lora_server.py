# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from bench.lora_server import check_lora_server
from moe_lora.report.results import read_results

ONE = ["--only", "family=mixtral", "--only", "layout=EP2-PP1", "--only", "transport=shm"]
ONE += ["--only", "expert_parallel=1", "--only", "dtype=float32", "--only", "sites=all"]


@pytest.mark.slow
def test_combination_without_a_difference_is_recorded(tmp_path, capsys):
    out = tmp_path / "checked.jsonl"
    assert check_lora_server.main(["--out", str(out), *ONE]) == 0
    [record] = read_results(out)
    assert record["config"]["layout"] == "EP2-PP1"
    assert record["result"]["complaints"] == []
    assert record["result"]["num_added"] > 0
    assert "1 combinations checked, 0 failed" in capsys.readouterr().out


def test_difference_and_failure_to_run_fail_the_check(tmp_path, monkeypatch, capsys):
    run = check_lora_server.served_tokens

    def differing(model, row):
        if row["dtype"] == "bfloat16":
            raise OSError("no server")
        outcome = run(model, row)
        tallies = [replace(tally, num_wrong=1, first_wrong=103) for tally in outcome.tallies]
        return replace(outcome, tallies=tallies)

    monkeypatch.setattr(check_lora_server, "served_tokens", differing)
    out = tmp_path / "checked.jsonl"
    assert check_lora_server.main(["--out", str(out), *ONE[:8], "--only", "sites=all"]) == 1
    wrong, failed = (record["result"]["complaints"] for record in read_results(out))
    assert wrong == ["rank 0: 1 rows differ, first in layer 1 site 3"]
    assert failed == ["could not be run: OSError('no server')"]
    assert "2 combinations checked, 2 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "only", [["layout=EP3-PP1"], ["model=mixtral"], ["family=llama", "expert_parallel=2"]]
)
def test_filter_that_leaves_nothing_is_refused(only, tmp_path, capsys):
    filters = [word for text in only for word in ("--only", text)]
    with pytest.raises(SystemExit):
        check_lora_server.main(["--out", str(tmp_path / "checked.jsonl"), *filters])
    assert only[0] in capsys.readouterr().err
