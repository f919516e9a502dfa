# SPDX-License-Identifier: Apache-2.0
"""The demo's sample trace is what its script writes, and the script quotes the real trace correctly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from moe_lora.workload.traces.traces import read_trace

ROOT = Path(__file__).resolve().parents[3]
REAL = ROOT.parent / "shared" / "traces" / "azure_llm_2023_code.csv"


@pytest.fixture(scope="module")
def make_trace() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_trace", ROOT / "demo" / "make_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sample_trace_is_what_the_script_writes(make_trace: ModuleType) -> None:
    assert (ROOT / "demo" / "trace.csv").read_bytes() == make_trace.trace_text().encode()


def test_sample_trace_has_the_size_it_should() -> None:
    trace = read_trace(ROOT / "demo" / "trace.csv")
    assert trace.format == "azure"
    assert 200 <= len(trace.requests) <= 400
    assert 110 < trace.requests[-1].arrival_s < 120


def test_many_sample_requests_have_the_lengths_of_the_source(make_trace: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(make_trace.trace_text(duration_s=3000.0, seed=1))
    found = make_trace.measure(str(path))
    # The inner quantiles; the ends are too sparse to compare.
    assert found["prompt_quantiles"][3:7] == pytest.approx(make_trace.PROMPT_QUANTILES[3:7], rel=0.1)
    assert found["output_quantiles"][3:7] == pytest.approx(make_trace.OUTPUT_QUANTILES[3:7], rel=0.1)
    assert found["silent_share"] == pytest.approx(0.75, abs=0.08)
    assert found["requests_per_s"] == pytest.approx(2.57, rel=0.25)


@pytest.mark.shared_data
def test_script_quotes_the_real_trace(make_trace: ModuleType) -> None:
    if not REAL.exists():
        pytest.skip(f"{REAL.name} is not there")
    found = make_trace.measure(str(REAL))
    assert found["requests_per_spell"] == pytest.approx(make_trace.REQUESTS_PER_SPELL, rel=0.01)
    assert found["silence_mean_s"] == pytest.approx(make_trace.SILENCE_MEAN_S, rel=0.01)
    assert found["gap_quantiles_s"] == pytest.approx(make_trace.GAP_QUANTILES_S, rel=0.01)
    assert found["prompt_quantiles"] == pytest.approx(make_trace.PROMPT_QUANTILES, rel=0.01)
    assert found["output_quantiles"] == pytest.approx(make_trace.OUTPUT_QUANTILES, rel=0.01)
