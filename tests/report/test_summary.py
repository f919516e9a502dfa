# SPDX-License-Identifier: Apache-2.0
"""A run of five requests summed up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lora.report import ClientTiming, RequestRecord, SloTargets, summarize


def record(
    adapter: str | None, ttft_s: float, tpot_s: float, num_tokens: int = 3, sent_s: float = 0.0
) -> RequestRecord:
    times = tuple(sent_s + ttft_s + tpot_s * place for place in range(num_tokens))
    timing = ClientTiming(sent_s=sent_s, token_times_s=times, end_s=times[-1], num_output_tokens=num_tokens)
    return RequestRecord(adapter=adapter, arrival_s=sent_s, sent_s=sent_s, input_tokens=10, timing=timing)


FAILED = RequestRecord(adapter="b", arrival_s=0.0, sent_s=0.0, input_tokens=10, error="HTTP 503: busy")
INTERRUPTED = replace(FAILED, error=None)
RECORDS = [
    record("a", 0.1, 0.05),
    record("a", 0.2, 0.05, sent_s=0.15),
    record("b", 0.1, 0.05),
    record(None, 0.9, 0.05),
    FAILED,
    INTERRUPTED,
]
SLO = SloTargets(ttft_s=0.25, tpot_s=0.1)


def test_counts_and_rates() -> None:
    found = summarize(RECORDS, 2.0, SLO)
    assert (found["completed"], found["failed"], found["interrupted"]) == (4, 1, 1)
    assert found["total_input_tokens"] == 40
    assert found["total_output_tokens"] == 12
    assert found["request_throughput"] == 2.0
    assert found["request_goodput"] == 1.5
    assert found["output_throughput"] == 6.0
    assert found["total_token_throughput"] == 26.0
    assert found["max_concurrent_requests"] == 4


def test_latency_statistics() -> None:
    found = summarize(RECORDS, 2.0, SLO)
    assert found["mean_ttft_ms"] == pytest.approx((100 + 200 + 100 + 900) / 4)
    assert found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(150)
    assert found["p90_ttft_ms"] == pytest.approx(690)  # 200 + 0.7 * (900 - 200)
    assert found["mean_tpot_ms"] == pytest.approx(50)
    assert found["std_tpot_ms"] == pytest.approx(0, abs=1e-6)
    assert found["p99_itl_ms"] == pytest.approx(50)
    assert found["p95_e2el_ms"] == pytest.approx(300 + 0.85 * 700)
    assert found["avg_latency_ms"] == pytest.approx((200 + 300 + 200 + 1000) / 12)
    assert found["mean_tpt_ms"] == pytest.approx((200 + 300 + 200 + 1000) / 12)
    assert found["mean_decode_ttft_ms"] is None


def test_attainment_is_judged_by_adapter_and_a_failure_is_a_miss() -> None:
    found = summarize(RECORDS, 2.0, SLO)
    assert found["slo_attainment"] == pytest.approx(3 / 5)
    assert found["num_adapters"] == 2
    assert found["slo_attainment_adapters"] == 0.5
    assert found["slo_attainment_adapters_decode_ttft"] is None


def test_exactly_ninety_percent_does_not_attain() -> None:
    nine_of_ten = [record("a", 0.1, 0.05)] * 9 + [record("a", 0.9, 0.05)]
    assert summarize(nine_of_ten, 1.0, SLO)["slo_attainment_adapters"] == 0.0
    assert summarize([*nine_of_ten, record("a", 0.1, 0.05)], 1.0, SLO)["slo_attainment_adapters"] == 1.0


def test_decode_ttft_is_judged_where_every_request_has_it() -> None:
    slow = record("a", 0.9, 0.05)
    assert slow.timing is not None
    slow = replace(slow, timing=replace(slow.timing, decode_ttft_ms=80.0))
    found = summarize([slow], 1.0, SLO)
    assert found["slo_attainment_adapters"] == 0.0
    assert found["slo_attainment_adapters_decode_ttft"] == 1.0
    assert found["p95_decode_ttft_ms"] == 80.0


def test_exact_answers_are_a_share_of_those_checked() -> None:
    checked = [replace(RECORDS[0], exact=True), replace(RECORDS[0], exact=False), RECORDS[0]]
    found = summarize(checked, 1.0, SLO)
    assert (found["checked_answers"], found["exact_answers"]) == (2, 0.5)


def test_run_without_a_completed_request_has_nulls() -> None:
    found = summarize([FAILED], 1.0, SLO)
    assert found["mean_ttft_ms"] is None
    assert found["avg_latency_ms"] is None
    assert found["slo_attainment"] == 0.0
    assert summarize([], 1.0, SLO)["slo_attainment"] is None
