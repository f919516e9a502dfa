# SPDX-License-Identifier: Apache-2.0
"""The definitions, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from moe_lora.report import ClientTiming, SloTargets, avg_latency_ms

# Sent at 1.0 s, tokens at 1.2, 1.3, 1.5 s, end at 1.6 s.
TIMING = ClientTiming(
    sent_s=1.0, token_times_s=(1.2, 1.3, 1.5), end_s=1.6, num_output_tokens=4, decode_ttft_ms=90.0
)
SINGLE = ClientTiming(sent_s=0.0, token_times_s=(0.1,), end_s=0.1, num_output_tokens=1)


def test_each_definition_gives_the_number_worked_by_hand() -> None:
    assert TIMING.ttft_ms == pytest.approx(200)
    assert TIMING.e2el_ms == pytest.approx(600)
    assert TIMING.tpot_ms == pytest.approx(400 / 3)
    assert TIMING.itl_ms == pytest.approx([100, 200])
    assert TIMING.tpt_ms == pytest.approx(150)


def test_single_token_has_no_tpot() -> None:
    assert SINGLE.tpot_ms is None
    assert SINGLE.itl_ms == []


def test_average_latency_weighs_by_tokens() -> None:
    assert avg_latency_ms([TIMING, SINGLE]) == pytest.approx(700 / 5)
    assert avg_latency_ms([]) is None


def test_slo_needs_both_targets_met() -> None:
    assert SloTargets(ttft_s=0.2001, tpot_s=0.134).met_by(TIMING)
    assert not SloTargets(ttft_s=0.19, tpot_s=0.134).met_by(TIMING)
    assert not SloTargets(ttft_s=0.21, tpot_s=0.13).met_by(TIMING)
    assert SloTargets(ttft_s=0.11, tpot_s=0.0001).met_by(SINGLE)


def test_decode_slo_takes_the_servers_ttft() -> None:
    slo = SloTargets(ttft_s=0.1, tpot_s=0.134)
    assert slo.met_in_decode_by(TIMING)
    assert not slo.met_in_decode_by(SINGLE)


@pytest.mark.parametrize(
    "change", [{"end_s": 1.4}, {"sent_s": 1.25}, {"token_times_s": ()}, {"num_output_tokens": 0}]
)
def test_impossible_timing_is_refused(change: dict) -> None:
    good = {"sent_s": 1.0, "token_times_s": (1.2, 1.5), "end_s": 1.6, "num_output_tokens": 2}
    with pytest.raises(ValueError, match=r"order|at least one token"):
        ClientTiming(**{**good, **change})


def test_slo_must_be_positive() -> None:
    with pytest.raises(ValueError, match="> 0"):
        SloTargets(ttft_s=0.0)
