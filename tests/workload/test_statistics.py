# SPDX-License-Identifier: Apache-2.0
"""A trace in numbers, against the same numbers computed from the whole trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.workload.statistics import trace_statistics
from moe_lora.workload.traces.traces import read_trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def write_own(folder: Path, rows: list[tuple[float, int, int, str | None]]) -> Path:
    path = folder / "trace.jsonl"
    names = ("arrival_s", "prompt_tokens", "output_tokens", "adapter")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_numbers_of_a_small_trace(tmp_path: Path) -> None:
    rows = [(10.0, 4, 1, "x"), (11.0, 8, 1, "y"), (12.0, 6, 4, "x"), (210.0, 2, 2, None)]
    found = trace_statistics(write_own(tmp_path, rows))
    assert (found.format, found.num_requests, found.duration_s) == ("own", 4, 200.0)
    assert found.mean_rate_per_s == pytest.approx(3 / 200)
    assert found.peak_rate_per_s == pytest.approx(3 / 60)
    assert (found.prompt_tokens.mean, found.prompt_tokens.p50, found.prompt_tokens.p95) == (5.0, 4, 8)
    assert (found.output_tokens.mean, found.output_tokens.max) == (2.0, 4)
    assert found.adapter_counts == {"x": 2, "y": 1}
    popularity = found.popularity()
    assert popularity is not None
    assert dict(zip(popularity.adapters, popularity.probabilities, strict=True)) == {"x": 2 / 3, "y": 1 / 3}


def test_peak_of_a_trace_shorter_than_the_window_is_its_mean(tmp_path: Path) -> None:
    found = trace_statistics(write_own(tmp_path, [(float(i), 1, 1, None) for i in range(11)]))
    assert found.mean_rate_per_s == found.peak_rate_per_s == 1.0
    assert found.popularity() is None


def test_trace_of_one_moment_or_without_times_has_no_rate(tmp_path: Path) -> None:
    assert trace_statistics(write_own(tmp_path, [(1.0, 1, 1, None)] * 3)).mean_rate_per_s is None
    path = tmp_path / "s.json"
    path.write_text('[{"conversations": [{"value": "a b"}, {"value": "c"}]}]' * 2)
    found = trace_statistics(path)
    assert (found.num_requests, found.mean_rate_per_s, found.peak_rate_per_s) == (2, None, None)


@pytest.mark.parametrize("window_s", [0.0, -1.0, float("nan")])
def test_impossible_window_is_refused(tmp_path: Path, window_s: float) -> None:
    with pytest.raises(ValueError, match="window_s"):
        trace_statistics(write_own(tmp_path, [(1.0, 1, 1, None)]), window_s=window_s)


def test_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(ValueError, match="no request in the trace"):
        trace_statistics(path)


@settings(deadline=None)
@given(
    gaps=st.lists(st.floats(0, 40), min_size=1, max_size=60),
    lengths=st.lists(st.integers(1, 2**31 - 1), min_size=60, max_size=60),
)
def test_one_pass_agrees_with_the_whole_trace(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[float], lengths: list[int]
) -> None:
    times = np.cumsum(gaps)
    rows = [(float(t), lengths[i], 1, None) for i, t in enumerate(times)]
    found = trace_statistics(write_own(tmp_path_factory.mktemp("t"), rows))
    ranked = sorted(lengths[: len(rows)])
    assert found.prompt_tokens.mean == pytest.approx(np.mean(ranked))
    assert found.prompt_tokens.p95 == pytest.approx(ranked[int(np.ceil(0.95 * len(rows))) - 1], rel=2**-15)
    if found.peak_rate_per_s is not None:
        within = [np.searchsorted(times, t + 60.0) - i for i, t in enumerate(times)]
        shorter = [np.searchsorted(times, t + 59.0) - i for i, t in enumerate(times)]
        assert found.peak_rate_per_s <= max(max(within) / 60.0, found.mean_rate_per_s or 0.0) + 1e-12
        assert found.peak_rate_per_s >= max(shorter) / 60.0 - 1e-12


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["azure_llm_2023_code.csv", "mooncake_synthetic.jsonl"])
def test_real_trace_in_numbers_agrees_with_the_whole(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not there")
    found, trace = trace_statistics(SHARED / name), read_trace(SHARED / name)
    prompts = [request.prompt_tokens for request in trace.requests]
    assert found.num_requests == len(prompts)
    assert found.prompt_tokens.mean == pytest.approx(np.mean(prompts))
    p95 = np.quantile(prompts, 0.95, method="inverted_cdf")
    assert found.prompt_tokens.p95 == pytest.approx(p95, rel=2**-15)
