# SPDX-License-Identifier: Apache-2.0
"""The load client end to end, against a server that speaks the protocol."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from moe_lora.config.plan import ReplayOptions
from moe_lora.report.load_client import (
    CompletionClient,
    ServerError,
    StreamedCompletion,
    base_url,
    error_message,
)
from moe_lora.report.replay import (
    ReplayOutcome,
    ReplayState,
    finished_record,
    replay,
    request_body,
    served_models,
)
from moe_lora.workload.replay_plan import PlannedRequest
from tests.patience import PATIENCE_S
from tests.sse_server import Served, running_server


@pytest.fixture
def served() -> Iterator[Served]:
    with running_server() as server:
        yield server


def planned(index: int = 0, arrival_s: float = 0.0, **settings) -> PlannedRequest:
    defaults = {"adapter": None, "prompt_tokens": 6, "output_tokens": 5}
    return PlannedRequest(index=index, arrival_s=arrival_s, **{**defaults, **settings})


def send(served: Served, plan: list[PlannedRequest], **settings) -> ReplayOutcome:
    return replay(plan, ReplayOptions(url=served.url, model="base", vocab_size=50, **settings))


def test_every_request_is_timed_counted_and_in_order(served: Served) -> None:
    plan = [
        planned(i, i * 0.01, adapter=("reverse", None, "other")[i % 3], output_tokens=4 + i) for i in range(9)
    ]
    outcome = send(served, plan)
    assert not outcome.interrupted
    assert [record.adapter for record in outcome.records] == [request.adapter for request in plan]
    for request, record in zip(plan, outcome.records, strict=True):
        timing = record.timing
        assert timing is not None
        assert timing.num_output_tokens == request.output_tokens
        assert len(timing.itl_ms) <= request.output_tokens - 1
        assert record.input_tokens == 6
        assert timing.sent_s >= request.arrival_s
        assert timing.end_s <= outcome.duration_s
    # The client counts from before the server has the request to after the server gave out a token.
    assert min(r.timing.ttft_ms for r in outcome.records if r.timing) / 1e3 >= min(
        given - received for given, received in zip(served.first_token_s, served.received_s, strict=True)
    )


def test_last_chunk_without_text_is_no_token() -> None:
    completion = StreamedCompletion(sent_s=0.0)
    completion.take({"choices": [{"text": "a", "finish_reason": None}]}, 1.0)
    completion.take(
        {"choices": [{"text": "", "finish_reason": None}]}, 2.0
    )  # a token that yields no text yet
    completion.take({"choices": [{"text": "", "finish_reason": "length"}]}, 3.0)
    completion.take({"choices": [], "usage": {"completion_tokens": 3}}, 4.0)
    assert completion.token_times_s == [1.0, 2.0]
    assert completion.end_s == 3.0
    assert finished_record(planned(), completion, 0.0).timing.num_output_tokens == 3


def test_chunks_are_counted_where_the_server_gives_no_usage() -> None:
    completion = StreamedCompletion(sent_s=0.0)
    for now_s, reason in ((1.0, None), (2.0, "stop")):
        completion.take({"choices": [{"text": "a", "finish_reason": reason}], "usage": None}, now_s)
    record = finished_record(planned(), completion, 0.0)
    assert record.timing.num_output_tokens == 2
    assert record.input_tokens == 6


@pytest.mark.parametrize(
    "usage",
    [
        {"completion_tokens": "5"},
        {"completion_tokens": 2, "timing": {"queue_ms": "soon"}},
        {"prompt_tokens": -1},
    ],
)
def test_usage_of_another_form_is_an_error_of_the_server(usage: dict) -> None:
    completion = StreamedCompletion(sent_s=0.0, token_times_s=[1.0], end_s=1.0, usage=usage)
    with pytest.raises(ServerError, match=r"usage\."):
        finished_record(planned(), completion, 0.0)


@pytest.mark.parametrize("chunk", [{"choices": ["x"]}, {"choices": 5}, {"usage": [1]}])
def test_chunk_of_another_form_is_an_error_of_the_server(chunk: dict) -> None:
    with pytest.raises(ServerError, match="not of the OpenAI form"):
        StreamedCompletion(sent_s=0.0).take(chunk, 1.0)


def test_servers_own_timing_is_taken_where_it_gives_it(served: Served) -> None:
    base, other = send(served, [planned(), planned(1, adapter="other")]).records
    assert (base.timing.decode_ttft_ms, base.queue_ms, base.adapter_load_ms) == (12.5, 2.0, 0.5)
    assert (other.timing.decode_ttft_ms, other.queue_ms, other.adapter_load_ms) == (None, None, None)


def test_answers_are_checked(served: Served) -> None:
    right = planned(adapter="reverse", prompt="abcde", answer="edcba ", output_tokens=50)
    wrong = replace(right, answer="abcde")
    records = send(served, [right, wrong, replace(right, answer=None)]).records
    assert [record.exact for record in records] == [True, False, None]
    assert records[0].text == "edcba"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("error", "HTTP 503: overloaded"),
        ("broken", "error in the stream: engine died"),
        ("cut", "ended without a finish_reason"),
        ("hang", "timeout: no end within "),
        ("half a pair \ud83d", "surrogates not allowed"),
    ],
)
def test_failed_request_says_why_and_the_others_go_on(served: Served, prompt: str, said: str) -> None:
    for timeout_s in (0.5, 5.0, 50.0, PATIENCE_S):  # more, if it was too short for the other one
        plan = [planned(prompt=prompt), planned(1, prompt="fine")]
        bad, good = send(served, plan, timeout_s=timeout_s).records
        if good.error is None:
            break
    assert bad.timing is None
    assert said in (bad.error or "")
    assert good.error is None
    assert good.timing is not None


def test_a_token_without_text_is_an_answer(served: Served) -> None:
    [record] = send(served, [planned(prompt="silent")]).records
    assert record.error is None
    assert record.timing is not None
    assert record.timing.num_output_tokens == 1


def test_arrivals_are_open_loop(served: Served) -> None:
    # The first gets no answer before the second is sent.
    records = send(served, [planned(prompt="pair"), planned(1, 0.05)], timeout_s=PATIENCE_S).records
    assert [record.error for record in records] == [None, None]


def test_interrupt_keeps_what_there_is(served: Served) -> None:
    signals: list[int] = []

    def interrupt_once(state: ReplayState) -> None:
        if state.done == 1 and state.sent == 3 and not signals:
            signals.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    plan = [planned(prompt="fine"), planned(1, prompt="hang"), planned(2, prompt="hang"), planned(3, 60.0)]
    outcome = replay(plan, ReplayOptions(url=served.url, model="base"), interrupt_once)
    assert outcome.interrupted
    assert outcome.records[0].timing is not None
    assert outcome.records[1].interrupted
    assert len(outcome.records) == 3


def test_progress_ends_with_all_requests_accounted_for(served: Served) -> None:
    states: list[ReplayState] = []
    plan = [planned(0, prompt="error"), planned(1), planned(2)]
    replay(plan, ReplayOptions(url=served.url, model="base"), states.append)
    last = states[-1]
    assert (last.total, last.sent, last.done, last.failed, last.output_tokens) == (3, 3, 2, 1, 10)


def test_server_that_goes_away_is_an_error_per_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"no server at .*; start one, or correct --url"):
            served_models(url)
        outcome = replay([planned()], ReplayOptions(url=url, model="base"))
    assert (outcome.records[0].error or "").startswith("connection:")


def test_models_are_told_apart_by_parent(served: Served) -> None:
    models = served_models(served.url + "/v1/")
    assert models.base == ("base",)
    assert models.adapters == ("reverse", "other")


def test_body_asks_for_the_length_and_random_ids() -> None:
    options = ReplayOptions(url="x", model="base", vocab_size=50)
    body = request_body(planned(), options)
    assert body["model"] == "base"
    assert len(body["prompt"]) == 6
    assert max(body["prompt"]) < 50
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (5, True, True)
    assert body["stream_options"] == {"include_usage": True}
    body = request_body(planned(prompt="hi", adapter="x"), replace(options, force_length="min-tokens"))
    assert (body["model"], body["prompt"], body["min_tokens"]) == ("x", "hi", 5)
    assert "ignore_eos" not in body
    answered = request_body(planned(prompt="hi", answer="ih"), options)
    assert "ignore_eos" not in answered
    assert "min_tokens" not in answered


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="ignore-eos, min-tokens, off"):
        ReplayOptions(url="x", model="m", force_length="pad")
    with pytest.raises(ValueError, match="timeout_s=0"):
        ReplayOptions(url="x", model="m", timeout_s=0)


@pytest.mark.parametrize("url", ["h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_url_is_taken_in_the_forms_people_type(url: str) -> None:
    assert base_url(url) == "http://h:1"


def test_key_is_sent_and_not_shown() -> None:
    assert "secret" not in repr(ReplayOptions(url="x", model="m", api_key="secret"))
    client = CompletionClient("h:1", timeout_s=1.0, max_connections=1, api_key="secret")
    assert client._http.headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "m"}}, "m"),
        ({"error": "m"}, "m"),
        ({"detail": "m"}, "m"),
        ({"message": "m"}, "m"),
        ("m", "m"),
    ],
)
def test_error_bodies_of_all_forms_are_understood(body: object, said: str) -> None:
    assert error_message(body) == said


def test_an_odd_answer_is_one_failed_request() -> None:
    @asynccontextmanager
    async def connect() -> AsyncIterator[OddAnswers]:
        yield OddAnswers()

    options = ReplayOptions(url="", model="base", vocab_size=50)
    outcome = replay([planned(i) for i in range(3)], options, connect=connect)
    assert [record.error for record in outcome.records] == [None, "TypeError: odd", None]
    completion = StreamedCompletion(sent_s=0.0)
    with pytest.raises(ServerError, match="not of the OpenAI form"):
        completion.take({"choices": [{"text": ["x"]}]}, 1.0)


class OddAnswers:
    """Answers; the second raises."""

    def __init__(self) -> None:
        self.num_answers = 0

    async def complete(self, body: dict[str, Any]) -> StreamedCompletion:
        self.num_answers += 1
        if self.num_answers == 2:
            raise TypeError("odd")
        return StreamedCompletion(sent_s=0.0, token_times_s=[0.0], texts=["x"], finish_reason="stop")


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:port is no URL"):
        served_models("http://127.0.0.1:port")
