"""Statistics of a trace, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lora.provision.load import load_of, read_load
from moe_lora.workload.records import TraceRequest


def test_statistics_by_hand() -> None:
    arrivals = [0.0, 1.0, 2.0, 61.0, 62.0, 63.0, 64.0, 65.0, 180.0]
    requests = [
        TraceRequest(arrival, 100, 10 if i else 90, adapter="a" if i % 3 else "b")
        for i, arrival in enumerate(arrivals)
    ]
    found = load_of(requests)
    assert found is not None
    assert found.rate_per_s == pytest.approx(8 / 180)
    assert found.peak_rate_per_s == pytest.approx(5 / 60)
    assert found.mean_output_tokens == pytest.approx(170 / 9)
    assert found.p95_output_tokens == 90
    assert found.context_tokens == pytest.approx(100 + 170 / 9)
    popularity = found.popularity()
    assert popularity is not None
    assert dict(zip(popularity.adapters, popularity.probabilities, strict=True)) == pytest.approx(
        {"b": 3 / 9, "a": 6 / 9}
    )


def test_requests_at_one_moment_have_no_rate_and_no_names_no_popularity() -> None:
    found = load_of([TraceRequest(0.0, 1, 1)] * 3)
    assert found is not None
    assert (found.rate_per_s, found.peak_rate_per_s, found.popularity()) == (None, None, None)


def test_empty_trace_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,5,0\n")
    with pytest.raises(ValueError, match=r"no request in the trace \(1 rows: no output tokens"):
        read_load(path)
