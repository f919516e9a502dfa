# SPDX-License-Identifier: Apache-2.0
"""Requests that have a time to be done in, and those that go before others."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from moe_lora.serve import connections
from moe_lora.serve.openai import generation
from tests.patience import PATIENCE_S

from .conftest import scripted, serving
from .test_limits import limited_server, refused

COMPLETE = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True}


def test_a_request_that_is_not_done_in_time_ends_with_408_and_costs_no_more(tokenizer):
    hangs = scripted(tokenizer, hang_after=3)
    with serving(hangs, tokenizer) as server:
        answer = server.post(COMPLETE, {**LONG, "timeout": 0.12})
        assert answer.status_code == 408
        assert answer.json()["error"]["message"].startswith("not done within timeout=0.12 s")
        header = server.http.post(
            COMPLETE, json={**LONG, "timeout": 60}, headers={"X-Request-Timeout": "0.12"}
        )
        assert header.status_code == 408
        assert len(hangs.aborted) == len(hangs.requests) == 2
        assert not hangs.running


def test_the_time_begins_with_the_headers_and_each_that_is_over_is_counted(tokenizer, monkeypatch):
    """The headers came so long ago that nothing is left of the time."""
    long_ago = SimpleNamespace(monotonic=lambda: time.monotonic() - 2 * PATIENCE_S)
    monkeypatch.setattr(connections, "time", long_ago)
    hangs = scripted(tokenizer, hang_after=3)
    with limited_server(tokenizer, hangs, header_timeout_s=1e6, body_timeout_s=1e6) as (served, _):
        answer = served.post(COMPLETE, {**LONG, "timeout": PATIENCE_S})
        assert answer.status_code == 408
        assert refused(served, "timeout") == 1


def test_a_stream_that_is_not_done_in_time_ends_with_an_error_event(tokenizer):
    engine = scripted(tokenizer)
    with serving(engine, tokenizer) as server:
        for timeout_s in (1, 10, PATIENCE_S):  # more, if no token came in time
            engine.hang_after = engine.num_tokens + 2
            answer = server.post(COMPLETE, {**LONG, "timeout": timeout_s, "stream": True, "n": 2})
            if answer.status_code == 200:
                break
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.status_code == 200
    assert events[0]["choices"]
    assert events[-1]["error"]["code"] == 408
    assert not engine.running


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_that_its_stop_string_ended_is_no_408(tokenizer, monkeypatch, is_late):
    """The deadline passes just before the stop string, or between it and the engine's end."""
    engine, made = scripted(tokenizer), []

    class Seen(generation.Deadline):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    async def generate(request):
        if is_late:
            made[0]._end()
        yield engine._output(request, engine.answers[None], None)
        if not made[0]._timer.cancelled():
            made[0]._end()
        yield engine._output(request, (), "abort")

    monkeypatch.setattr(generation, "Deadline", Seen)
    monkeypatch.setattr(engine, "generate", generate)
    with serving(engine, tokenizer) as server:
        answer = server.post(COMPLETE, {"prompt": "hello", "stop": " world", "timeout": PATIENCE_S})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "hello"


def test_a_request_that_is_done_in_time_is_not_touched(server, engine):
    assert server.post(COMPLETE, {"prompt": "hello", "timeout": PATIENCE_S}).status_code == 200
    assert not engine.aborted


@pytest.mark.parametrize("timeout", [0, -1, 1e9, "1", True])
def test_times_that_none_is_are_400(server, timeout):
    assert server.post(COMPLETE, {"prompt": "hello", "timeout": timeout}).status_code == 400


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e9", "soon"])
def test_headers_that_say_no_time_are_400(server, text):
    answer = server.http.post(COMPLETE, json={"prompt": "hello"}, headers={"X-Request-Timeout": text})
    assert (answer.status_code, "X-Request-Timeout" in answer.text) == (400, True)


def test_a_priority_goes_to_the_engine(server, engine):
    for priority in (None, 0, -3, 1000):
        assert server.post(COMPLETE, {"prompt": "hello", "priority": priority}).status_code == 200
    assert [request.priority for request in engine.requests] == [0, 0, -3, 1000]
    for priority in (1001, 0.5, "1", True):
        assert server.post(COMPLETE, {"prompt": "hello", "priority": priority}).status_code == 400
