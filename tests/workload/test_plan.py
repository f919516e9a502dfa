# SPDX-License-Identifier: Apache-2.0
"""From trace and options to the requests to send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_lora.config.plan import WorkloadOptions
from moe_lora.workload.popularity.popularity import uniform, zipf
from moe_lora.workload.replay_plan import (
    PromptRow,
    choose_rows,
    cut_text,
    make_plan,
    random_token_ids,
    read_prompts,
)
from moe_lora.workload.traces.records import Trace, TraceRequest

TRACE = Trace(
    "t.csv",
    "own",
    (
        TraceRequest(0.0, 100, 10),
        TraceRequest(1.0, 2000, 20, adapter="named"),
        TraceRequest(4.0, 50, 500, prompt="some text here"),
    ),
)


def test_recorded_times_and_lengths_are_kept_without_options() -> None:
    plan = make_plan(TRACE, WorkloadOptions())
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in plan] == [
        (0.0, 100, 10),
        (1.0, 2000, 20),
        (4.0, 50, 500),
    ]


def test_adapter_of_the_trace_goes_before_a_drawn_one() -> None:
    assert [r.adapter for r in make_plan(TRACE, WorkloadOptions())] == [None, "named", None]
    plan = make_plan(TRACE, WorkloadOptions(), uniform(["x"]))
    assert [r.adapter for r in plan] == ["x", "named", "x"]


def test_lengths_are_clipped() -> None:
    plan = make_plan(TRACE, WorkloadOptions(max_prompt_tokens=60, max_output_tokens=15))
    assert [(r.prompt_tokens, r.output_tokens) for r in plan] == [(60, 10), (60, 15), (50, 15)]


def test_drawn_arrivals_go_round_the_trace_and_stay_within_the_duration() -> None:
    options = WorkloadOptions(arrivals="gamma", request_rate_per_s=5.0, duration_s=10.0)
    plan = make_plan(TRACE, options)
    assert len(plan) > 20
    assert plan[-1].arrival_s < 10.0
    assert [r.prompt_tokens for r in plan[:4]] == [100, 2000, 50, 100]


def test_equal_seeds_give_equal_plans_and_others_do_not() -> None:
    def plan(seed: int) -> list[tuple[float, str | None]]:
        options = WorkloadOptions(arrivals="gamma", request_rate_per_s=5.0, num_requests=40, seed=seed)
        return [(r.arrival_s, r.adapter) for r in make_plan(TRACE, options, zipf(["a", "b", "c"], 1.0))]

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


def test_recorded_arrivals_are_scaled_and_cut() -> None:
    plan = make_plan(TRACE, WorkloadOptions(request_rate_per_s=1.0, duration_s=1.0))
    assert [r.arrival_s for r in plan] == [0.0, 0.5]


def test_num_requests_limits_recorded_arrivals() -> None:
    assert len(make_plan(TRACE, WorkloadOptions(num_requests=2))) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"arrivals": "gamma"}, "--request-rate"),
        ({"arrivals": "uniform"}, "trace, gamma"),
        ({"burstiness": 0.5}, "--arrivals gamma"),
        ({"prompts": "lyrics"}, "random, text"),
        ({"num_requests": 0}, "1 or more"),
        ({"max_prompt_tokens": -3}, "1 or more"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorkloadOptions(**settings)


def test_trace_without_times_needs_a_rate() -> None:
    trace = Trace("s.json", "sharegpt", TRACE.requests, has_arrival_times=False)
    with pytest.raises(ValueError, match="give --request-rate"):
        make_plan(trace, WorkloadOptions())
    assert make_plan(trace, WorkloadOptions(arrivals="gamma", request_rate_per_s=1.0))


def test_text_prompts_need_texts() -> None:
    with pytest.raises(ValueError, match="no prompt texts"):
        make_plan(TRACE, WorkloadOptions(prompts="text"))


def test_random_prompts_are_deterministic_and_below_the_vocabulary() -> None:
    ids = random_token_ids(3, 1000, 50, seed=1)
    assert len(ids) == 1000
    assert set(ids) <= set(range(50))
    assert ids == random_token_ids(3, 1000, 50, seed=1)
    assert ids != random_token_ids(4, 1000, 50, seed=1)


def test_prompts_that_share_hash_ids_share_prefixes() -> None:
    first = random_token_ids(0, 1200, 99, seed=1, hash_ids=(7, 8, 9))
    second = random_token_ids(1, 1100, 99, seed=1, hash_ids=(7, 8, 10))
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]
    assert len(random_token_ids(1, 700, 99, seed=1, hash_ids=(7,))) == 700


def test_long_text_is_cut_in_proportion() -> None:
    assert cut_text("abcdefgh", 2, 4) == "abcd"
    assert cut_text("abcdefgh", 9, 4) == "abcdefgh"


ROWS = [PromptRow("x", "p" * length, "a" * length) for length in (8, 2, 4, 6)] + [PromptRow(None, "base")]


def test_rows_are_matched_by_rank_of_length_within_the_adapter() -> None:
    wanted = [("x", 5000), ("x", 10), (None, 3), ("x", 70), ("x", 20)]
    assert [len(row.prompt) for row in choose_rows(wanted, ROWS)] == [8, 2, 4, 6, 4]


def test_adapter_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no row for adapter 'y'; it has rows for None, x"):
        choose_rows([("y", 3)], ROWS)


def test_answers_get_room_and_replace_the_length_of_the_trace() -> None:
    planned = make_plan(TRACE, WorkloadOptions(num_requests=1), uniform(["x"]), ROWS)[0]
    assert planned.answer == "a" * len(planned.prompt or "")
    assert planned.output_tokens >= len(planned.answer)
    clipped = make_plan(TRACE, WorkloadOptions(num_requests=1, max_output_tokens=3), uniform(["x"]), ROWS)
    assert clipped[0].output_tokens == 3


def test_prompt_rows_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"adapter": "x", "prompt": "p", "answer": "a", "task": "more"}) + "\n\n")
    assert read_prompts(path) == [PromptRow("x", "p", "a")]
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_prompts(path) == [PromptRow(None, "a\u2028b\x85c", None)], (
        "JSON allows these line ends in text"
    )
    for text, said in (
        ('{"adapter": "x"}', "'prompt'"),
        ("{", "not JSON"),
        ('{"prompt": "p", "answer": 1}', "'answer'"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"rows\.jsonl, line 1") as caught:
            read_prompts(path)
        assert said in str(caught.value)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(path)


def test_busiest_stretch_begins_where_most_arrivals_fall_within_the_duration() -> None:
    times = [0.0, 1.0, 50.0, 50.5, 51.0, 51.9, 90.0]
    requests = tuple(TraceRequest(t, 10 + i, 5) for i, t in enumerate(times))
    trace = Trace("t", "own", requests)
    plan = make_plan(trace, WorkloadOptions(duration_s=2.0, busiest=True))
    assert [request.prompt_tokens for request in plan] == [12, 13, 14, 15]
    assert plan[0].arrival_s == 0.0
    with pytest.raises(ValueError, match="give --duration-s"):
        WorkloadOptions(busiest=True)


def test_prompts_of_a_file_are_cut_unless_longer_ones_have_answers() -> None:
    options = WorkloadOptions(max_prompt_tokens=2)
    rows = [PromptRow(None, "word " * 8), PromptRow("named", "word " * 8)]
    plan = make_plan(TRACE, options, rows=rows)
    assert max(request.prompt_tokens for request in plan) <= 2
    short, long = PromptRow("named", "a", "b"), PromptRow("named", "word " * 3, "b")
    assert any(request.answer for request in make_plan(TRACE, options, rows=[rows[0], short]))
    with pytest.raises(ValueError, match=rf"of {long.prompt_tokens} tokens .* answer"):
        make_plan(TRACE, options, rows=[*rows, short, long])
