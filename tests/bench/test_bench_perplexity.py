# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import pytest
import torch
from click.testing import CliRunner

from bench.quantised import bench_perplexity
from moe_lora.report.results import read_results

WORDS = ("an", "adapter", "of", "the", "model", "serves", "many", "requests", "with", "its", "own", "rank")


def fixed_text() -> tuple[bytes, bytes]:
    """Text of training and of the test: a change of the pages changes no figure."""
    rng = random.Random(10)
    made = [" ".join(rng.choices(WORDS, k=size)).encode() for size in (9000, 1000)]
    return made[0], made[1]


@pytest.mark.slow
def test_each_format_has_a_record_and_only_the_quantised_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    assert all(len(text) > 10_000 for text in bench_perplexity.docs_bytes())
    monkeypatch.setattr(bench_perplexity, "docs_bytes", fixed_text)
    out, threads = tmp_path / "out.jsonl", torch.get_num_threads()
    done = CliRunner().invoke(bench_perplexity.main, ["--quick", "--out", str(out)])
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    found = {
        (r["config"]["model"], r["config"]["weights"]): r["result"]["over_unquantised"]
        for r in read_results(out)
    }
    assert len(found) == 2 * len(bench_perplexity.FORMATS)
    for model in ("demo", "bytes"):
        assert found[model, "none"] == 1.0
        assert found[model, "int8"] != 1.0
        assert abs(found[model, "int8"] - 1) < abs(found[model, "int4-128"] - 1) < 0.5
