# SPDX-License-Identifier: Apache-2.0
"""Operating points of servers whose highest rate is known, in the simulator, and their files."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.errors import ConfigError, SloError
from moe_lora.provision.operating_points import (
    OperatingPoint,
    PointLoad,
    RateRun,
    SloGoal,
    find_operating_point,
    judge,
    overload,
    points_content,
    read_operating_points,
    simulated_run,
)
from moe_lora.timing.step_model import StepModel

SLO = SloGoal(ttft_s=0.2, tpot_s=0.05)
LOAD = PointLoad(prompt_tokens=32, output_tokens=16, num_adapters=4, num_requests=60, duration_s=4.0)


def trial(rate_per_s: float, holds: bool) -> RateRun:
    return RateRun(rate_per_s=rate_per_s, p95_ttft_s=0.1, mean_tpot_s=0.01, holds=holds)


@given(limit=st.floats(1e-3, 1e4), start=st.floats(1e-2, 1e3), tolerance=st.floats(0.01, 0.5))
def test_search_ends_just_below_the_limit(limit: float, start: float, tolerance: float) -> None:
    point = find_operating_point(
        lambda rate, seed: trial(rate, rate <= limit),
        lora_rank=8,
        tokens_per_request=10,
        start_per_s=start,
        tolerance=tolerance,
        max_doublings=40,
        max_halvings=40,
    )
    assert (
        point.rate_per_s <= limit <= point.fails_at_per_s <= point.rate_per_s * (1 + tolerance) * (1 + 1e-9)
    )
    assert point.tokens_per_s == pytest.approx(10 * point.rate_per_s)


def test_repeats_are_voted_on_and_end_when_decided() -> None:
    asked: list[tuple[float, int]] = []

    def run(rate: float, seed: int) -> RateRun:
        asked.append((rate, seed))
        return trial(rate, rate < 10 and not (rate > 5 and seed == 0))

    point = find_operating_point(
        run, lora_rank=8, tokens_per_request=1, start_per_s=8, tolerance=0.9, repeats=3
    )
    assert point.rate_per_s >= 8
    assert [seed for rate, seed in asked if rate == 8] == [0, 1, 2]
    assert [seed for rate, seed in asked if rate == 16] == [0, 1]


def test_two_repeats_that_disagree_do_not_hold() -> None:
    point = find_operating_point(
        lambda rate, seed: trial(rate, rate < (8 if seed else 3)),
        lora_rank=8,
        tokens_per_request=1,
        start_per_s=2,
        repeats=2,
    )
    assert point.rate_per_s < 3


def test_a_server_without_limit_and_one_without_rate_are_told() -> None:
    with pytest.raises(SloError, match="still hold the SLO; tighten"):
        find_operating_point(lambda r, s: trial(r, True), lora_rank=8, tokens_per_request=1, start_per_s=1)
    with pytest.raises(SloError, match=r"rank 8: not even .* raise --slo-ttft-s"):
        find_operating_point(lambda r, s: trial(r, False), lora_rank=8, tokens_per_request=1, start_per_s=1)
    with pytest.raises(ConfigError, match="start_per_s=0"):
        find_operating_point(lambda r, s: trial(r, False), lora_rank=8, tokens_per_request=1, start_per_s=0)


@dataclass(frozen=True)
class Served:
    arrival_s: float
    first_token_s: float
    finish_s: float
    output_tokens: int = 11


def test_judgement_by_hand() -> None:
    good = [Served(i, i + 0.1, i + 0.4) for i in range(40)]
    found = judge(1.0, good, SLO)
    assert found.holds
    assert (found.p95_ttft_s, found.mean_tpot_s) == pytest.approx((0.1, 0.03))
    late = [*good[:36], *(Served(i, i + 0.3, i + 0.6) for i in range(36, 40))]
    assert not judge(1.0, late, SLO).holds
    assert not judge(1.0, [Served(i, i + 0.1, i + 0.7) for i in range(40)], SLO).holds


def test_the_first_tenth_is_left_out() -> None:
    slow_start = [Served(i, i + (9.0 if i < 4 else 0.1), i + 9.2) for i in range(40)]
    assert judge(1.0, slow_start, SloGoal(ttft_s=0.2, tpot_s=1.0)).holds


def test_a_stopped_run_fails() -> None:
    assert overload(2.0, 9.0) == RateRun(
        rate_per_s=2.0, p95_ttft_s=9.0, mean_tpot_s=0.0, holds=False, overloaded=True
    )


def test_a_run_lasts_as_long_as_it_must() -> None:
    assert len(LOAD.plan(1.0, ["a"], 0)) == 60
    plan = LOAD.plan(1000.0, ["a", "b"], 0)
    assert len(plan) == 4000
    assert {request.adapter for request in plan} == {"a", "b"}
    assert plan == LOAD.plan(1000.0, ["a", "b"], 0) != LOAD.plan(1000.0, ["a", "b"], 1)
    assert plan[-1].arrival_s == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(
    ("field", "value"), [("output_tokens", 1), ("num_requests", 0), ("num_adapters", 0), ("duration_s", -1.0)]
)
def test_bad_loads_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        PointLoad(**{**vars(LOAD), field: value})
    with pytest.raises(ConfigError, match=r"slo\.tpot_s=0"):
        SloGoal(ttft_s=1, tpot_s=0)


def simulated_point(lora_rank: int, per_rank_s: float, load: PointLoad = LOAD) -> OperatingPoint:
    """Of a server whose decode step takes 10 ms plus per_rank_s a rank row, and prefill 0.1 ms a token."""
    model = StepModel(
        kernel="mbgmv",
        form="toppings",
        expert_share=1.0,
        decode_s={"step": 0.01, "ranks": per_rank_s},
        prefill_s={"tokens": 1e-4},
    )
    return find_operating_point(
        lambda rate, seed: simulated_run(
            model, lora_rank, load, SLO, rate, seed, max_num_seqs=16, max_num_batched_tokens=256
        ),
        lora_rank=lora_rank,
        tokens_per_request=load.tokens_per_request,
        start_per_s=20.0,
    )


def test_simulated_points_fall_with_the_rank_if_steps_are_rank_dependent() -> None:
    low, high = simulated_point(8, 1e-5), simulated_point(128, 1e-5)
    assert high.tokens_per_s < 0.7 * low.tokens_per_s
    assert simulated_point(8, 0.0).tokens_per_s == simulated_point(128, 0.0).tokens_per_s


def test_simulated_point_stays_below_what_the_steps_allow() -> None:
    """Of a full batch of 16, a request takes 15 decode steps of 10 ms by 16, and 3.2 ms of prefill."""
    point = simulated_point(8, 0.0, replace(LOAD, duration_s=40.0))
    most_per_s = 1 / (15 * 0.01 / 16 + 32e-4)
    assert 0.8 * most_per_s < point.rate_per_s < 1.01 * most_per_s


def test_file_gives_back_the_points(tmp_path: Path) -> None:
    points = [simulated_point(rank, 1e-5) for rank in (64, 8)]
    content = points_content(points, kind="simulated", slo=SLO, load=LOAD, settings={}, env={})
    path = tmp_path / "points.json"
    path.write_text(json.dumps(content, allow_nan=False))
    assert read_operating_points(path) == {8: points[1].tokens_per_s, 64: points[0].tokens_per_s}
    path.write_text('{"16": 100, "8": 200.5}')
    assert list(read_operating_points(path).items()) == [(8, 200.5), (16, 100.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "it has no rank"),
        ("[1]", "must be a JSON object"),
        ("no", "not a JSON object"),
        ('{"8": 1, "8": 2}', "is given twice"),
        ('{"eight": 1}', r"eight.\[key\]=eight: .* valid integer"),
        ('{"8": -1}', "8=-1: .* greater than 0"),
        ('{"format": "x", "operating_points": {"8": 1}}', "format is not"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_operating_points(path)


def test_absent_file_is_told() -> None:
    with pytest.raises(ConfigError, match="`moe-lora operating-points MODEL_DIR --out FILE` writes one"):
        read_operating_points("absent.json")
    with pytest.raises(ConfigError, match="kind='guessed'"):
        points_content([], kind="guessed", slo=SLO, load=LOAD, settings={}, env={})
