# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from bench.quantised import bench_layers
from bench.quantised.bench_quantised import FORMATS, LLAMA, main
from moe_lora.kernels.cpu import cpu
from moe_lora.report.results import read_results


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_each_format_has_a_record_with_fewer_bytes_than_bf16(model, tmp_path):
    out, threads = tmp_path / "out.jsonl", torch.get_num_threads()
    done = CliRunner().invoke(main, ["--model", model, "--quick", "--threads", "1", "--out", str(out)])
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    records = read_results(out)
    weights = {
        (r["config"]["quantize"], r["config"]["num_requests"], r["config"]["num_adapters"]): r["result"][
            "read_bytes"
        ]["weights"]
        for r in records
    }
    assert set(weights) == {(f, *cell) for f in FORMATS for cell in ((1, 0), (8, 0), (8, 8))}
    for form in FORMATS[1:]:
        assert weights[form, 1, 0] < weights["none", 1, 0]
        assert weights[form.replace("fp8", "int4").replace("8", "4"), 8, 8] <= weights[form, 8, 8]
    assert all(r["result"]["over_bf16"]["num_pairs"] == 1 for r in records)


def test_llama_has_the_size_of_the_peers_comparison():
    assert 440e6 < LLAMA.num_parameters < 446e6


@pytest.mark.slow
def test_each_layer_has_a_record_beside_bf16(tmp_path):
    out, threads = tmp_path / "out.jsonl", torch.get_num_threads()
    done = CliRunner().invoke(bench_layers.main, ["--quick", "--threads", "1", "--out", str(out)])
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    records = read_results(out)
    assert len(records) == (len(bench_layers.FORMATS) + 1) * len(bench_layers.ROWS)
    read = {r["config"]["format"]: r["result"]["read_bytes"] for r in records}
    assert 2 * read["bf16"] > 3 * read["int8"] > 4 * read["mxfp4/32"]
    assert all(r["result"]["over_bf16"]["median"] == 1 for r in records if r["config"]["format"] == "bf16")
    assert {r["config"]["isa"] for r in records} == {cpu.isa()}
    assert f"of {len(records)} cells are slower than bf16" in done.output.splitlines()[-1]


def test_each_cell_slower_than_bf16_is_named():
    rows = [("bf16", "1.00"), ("int8", "0.99"), ("int4/64", "2.10")]
    lines = [{"layer": "down", "format": form, "rows": "16", "over bf16": over} for form, over in rows]
    *named, last = bench_layers.slower_cells(lines)
    assert named == ["slower than bf16: down, int8, 16 rows: 0.99"]
    assert last == f"{cpu.isa()}: 1 of 3 cells are slower than bf16"
