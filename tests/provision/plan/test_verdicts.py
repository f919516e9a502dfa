# SPDX-License-Identifier: Apache-2.0
"""Verdicts on replays, worked by hand."""

from __future__ import annotations

import pytest

from moe_lora.cli.provision_result import _missed, _verdict_lines
from moe_lora.provision.plan.verify import OTHER_DRAWS, Replay, Tolerance, Verdict, holds, verdicts

from .plans import inputs


def replay(
    at_once: float | None,
    ttft_s: float,
    tpot_s: float | None,
    arrivals: str = "poisson",
    stopped: bool = False,
) -> Replay:
    return Replay(
        arrivals=arrivals,
        num_requests=100,
        admitted_at_once=at_once,
        waited_for_adapter=None,
        waited_for_room=None,
        p95_ttft_s=ttft_s,
        p95_decode_ttft_s=ttft_s,
        mean_tpot_s=tpot_s,
        loads_per_s=0.0,
        stopped=stopped,
    )


def judged(*found: Replay, tolerance: Tolerance | None = None) -> dict[str, Verdict]:
    all_of = verdicts(inputs(), found, *([] if tolerance is None else [tolerance]))
    return {verdict.target: verdict for verdict in all_of}


def test_miss_says_by_how_much() -> None:
    found = judged(replay(0.94, 0.26, 0.05))
    assert (found["target_iar"].held, found["target_iar"].found) == (False, 0.94)
    assert found["target_iar"].missed_by == pytest.approx(0.01)
    assert found["slo_ttft_s"].missed_by == pytest.approx(0.01)
    assert (found["slo_tpot_s"].held, found["slo_tpot_s"].missed_by) == (True, 0.0)


def test_check_by_other_draws_allows_two_points_and_a_tenth() -> None:
    within = judged(replay(0.931, 0.274, 0.109), tolerance=OTHER_DRAWS)
    assert all(verdict.held for verdict in within.values())
    assert within["slo_ttft_s"].missed_by == pytest.approx(0.024)
    beyond = judged(replay(0.929, 0.276, 0.111), tolerance=OTHER_DRAWS)
    assert not any(verdict.held for verdict in beyond.values())


def test_replay_that_was_given_up_does_not_hold_whatever_it_shows() -> None:
    assert holds(inputs(), [replay(1.0, 0.1, 0.05)])
    assert not holds(inputs(), [replay(1.0, 0.1, 0.05, stopped=True)])


def test_misses_are_listed_below_their_target_and_in_one_line() -> None:
    found = [replay(0.9, 0.2, 0.05, arrivals="scaled"), replay(0.93, 0.2, 0.05)]
    all_of = verdicts(inputs(), found)
    lines = _verdict_lines(all_of)
    assert lines[0] == "At once, at least 95.00%: missed in 2 of 2 kinds of arrivals"
    assert lines[1].startswith("  at once missed by 5.00 points (90.00%) with the trace's arrivals scaled")
    assert lines[2].startswith("  at once missed by 2.00 points (93.00%) with Poisson arrivals")
    assert len(lines) == 5
    assert _missed(all_of).startswith("This plan does not hold its own check: at once missed by 5.00 points")
    assert "\n" not in _missed(all_of)


def test_what_no_request_shows_is_not_judged() -> None:
    found = judged(replay(1.0, 0.2, None))
    assert (found["slo_tpot_s"].held, found["slo_tpot_s"].missed_by) == (None, None)
    assert "not judged" in _verdict_lines(list(found.values()))[-1]
    assert holds(inputs(), [replay(1.0, 0.2, None)])
