"""Verdicts on replays, worked by hand."""

from __future__ import annotations

import pytest

from moe_lora.cli.provision_verify import _verdict_lines
from moe_lora.provision.replayed import Verified
from moe_lora.provision.verdicts import Verdict, verdicts
from moe_lora.sim.replay import CapacityReplay
from tests.provision.plans import inputs

Outcome = tuple[float | None, float | None, float | None]


def replayed(step_s: float, *outcomes: Outcome, arrivals: str = "poisson") -> list[Verified]:
    """At 9, 10 and 11 slots: (at once, P95 TTFT, TPOT)."""
    return [
        Verified(
            speed="sized",
            arrivals=arrivals,
            step_s=step_s,
            replay=CapacityReplay(
                capacity=9 + i,
                num_requests=100,
                admitted_at_once=at_once,
                waited_for_adapter=None,
                waited_for_room=None,
                p95_ttft_s=ttft_s,
                mean_tpot_s=tpot_s,
            ),
        )
        for i, (at_once, ttft_s, tpot_s) in enumerate(outcomes)
    ]


def judged(found: list[Verified]) -> dict[str, Verdict]:
    return {verdict.target: verdict for verdict in verdicts(inputs(), 10, found)}


def test_miss_says_by_how_much_and_where_it_is_held() -> None:
    found = judged(replayed(0.05, (0.9, 0.6, 0.05), (0.94, 0.24, 0.05), (0.96, 0.2, 0.05)))
    at_once = found["target_iar"]
    assert (at_once.held, at_once.held_from, at_once.found) == (False, 11, 0.94)
    assert at_once.missed_by == pytest.approx(0.01)
    ttft = found["slo_ttft_s"]
    assert (ttft.held, ttft.held_from, ttft.missed_by) == (True, 10, 0.0)
    assert found["slo_tpot_s"].held_from == 9


def test_target_held_only_below_a_miss_is_not_held_from_there() -> None:
    found = judged(replayed(0.05, (0.96, 0.2, 0.05), (0.96, 0.2, 0.05), (0.94, 0.3, 0.05)))
    assert found["target_iar"].held is True
    assert found["target_iar"].held_from is None


def test_speed_too_slow_for_the_first_token_is_said_to_be() -> None:
    rows = [(1.0, 0.29, 0.1)] * 3
    found = judged(replayed(0.1, *rows))
    assert not found["slo_ttft_s"].attainable
    assert found["slo_tpot_s"].attainable
    assert found["slo_tpot_s"].held is True
    lines = _verdict_lines(list(found.values()))
    assert lines[0] == "At once, at least 95.00%: held in 1 of 1 kinds of replay"
    assert lines[1] == "P95 TTFT, at most 0.250 s: missed in 1 of 1 kinds of replay"
    assert "missed by 0.040 s (0.290 s)" in lines[2]
    assert "can't be held at this speed: 0.295 s where nothing waits for a slot" in lines[2]


def test_misses_are_listed_below_their_target() -> None:
    found = [
        *replayed(0.05, *[(0.9, 0.2, 0.05)] * 3, arrivals="scaled"),
        *replayed(0.05, (0.9, 0.2, 0.05), (0.93, 0.2, 0.05), (0.97, 0.2, 0.05)),
    ]
    lines = _verdict_lines(verdicts(inputs(), 10, found))
    assert lines[0] == "At once, at least 95.00%: missed in 2 of 2 kinds of replay"
    assert lines[1].startswith("  missed by 5.00 points (90.00%) with the trace's arrivals scaled")
    assert lines[1].endswith("not held at 11 adapters either")
    assert lines[2].startswith("  missed by 2.00 points (93.00%) with Poisson arrivals")
    assert lines[2].endswith("held at 11 adapters")
    assert len(lines) == 5


def test_what_no_request_shows_is_not_judged() -> None:
    found = judged(replayed(0.05, *[(1.0, 0.2, None)] * 3))
    assert (found["slo_tpot_s"].held, found["slo_tpot_s"].missed_by) == (None, None)
    assert "not judged" in _verdict_lines(list(found.values()))[-1]
