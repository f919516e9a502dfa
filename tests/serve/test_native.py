# SPDX-License-Identifier: Apache-2.0
"""Streams of /generate, and /abort_request by ids, over a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest

from moe_lora.serve.openai.generation import Delta
from moe_lora.serve.openai.native import NativeFormat, NativeRequest, NativeStream
from moe_lora.serve.openai.protocol import StreamOptions
from tests.patience import PATIENCE_S

from .live_server import wait_until
from .test_controls import NUM, Http

SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
BODY = {"input_ids": [1, 40, 41], "lora_path": "upper", "return_logprob": True, "rid": "mine"}


@pytest.fixture
def http(exact) -> Iterator[Http]:
    found = Http(exact.url)
    yield found
    found.ok("POST", "/resume")


def streamed(http: Http, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.ok("POST", "/generate", json={**body, "stream": True}).splitlines()
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_each_event_has_the_answer_so_far_and_the_last_the_whole(http):
    body = {**BODY, "sampling_params": SAMPLING}
    whole = http.ok("POST", "/generate", json=body)
    events = streamed(http, body)
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    assert len(events) > 1
    assert all(whole["text"].startswith(event["text"]) for event in events)
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert {**events[-1], "meta_info": None} == {**whole, "meta_info": None}
    last, about = events[-1]["meta_info"], whole["meta_info"]
    assert last.pop("output_token_logprobs") == [
        [pytest.approx(value, abs=1e-5), token, None]
        for value, token, _ in about.pop("output_token_logprobs")
    ]
    assert last == about


class Logprob:
    """Counts its encodings."""

    num_reads = 0

    @property
    def logprob(self) -> float:
        self.num_reads += 1
        return -0.5


def test_an_event_encodes_its_own_tokens_alone():
    """A choice so far grows with each event; the encoding of earlier tokens is kept."""
    generation: Any = SimpleNamespace(
        prompts=[(1,)],
        num_choices=1,
        usage_of=lambda index: {"prompt_tokens": 1, "completion_tokens": 0},
        cached_tokens=[0],
    )
    frontend: Any = SimpleNamespace(tokenizer=None)
    body = NativeRequest.model_validate({"input_ids": [1]})
    form = NativeFormat(frontend, body, None, WeakValueDictionary())
    stream = NativeStream(generation, form, {"id": "mine"}, StreamOptions(), {})
    values: list[Any] = [Logprob() for _ in range(20)]
    for number, value in enumerate(values):
        delta = Delta(0, 'é"', (number,), (value,), None)
        event = json.loads(stream._events(delta).removeprefix(b"data: "))
    assert event["text"] == 'é"' * 20
    assert event["output_ids"] == list(range(20))
    assert event["meta_info"]["output_token_logprobs"] == [[-0.5, number, None] for number in range(20)]
    assert {value.num_reads for value in values} == {1}


def test_events_of_several_choices_have_indices(http):
    events = streamed(http, {"text": ["abc=", "ab="], "sampling_params": {**SAMPLING, "n": 2}})
    ends = [event["index"] for event in events if event["meta_info"]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_by_its_id_and_others_go_on(http, stream):
    http.ok("POST", "/pause?mode=keep")

    def ask(rid: str) -> str:
        body = {**BODY, "rid": rid, "stream": stream, "sampling_params": SAMPLING}
        return http("POST", "/generate", json=body).text

    with ThreadPoolExecutor(NUM) as pool:
        answers = [pool.submit(ask, f"rid-{number}") for number in range(NUM)]
        wait_until(lambda: http.num_waiting() == NUM, "all requests wait")
        http.ok("POST", "/abort_request", json={"rid": "rid-1"})
        http.ok("POST", "/abort_request", json={"rid": ["rid-2", "rid-3", "unknown"]})
        found = [answers[number].result(PATIENCE_S) for number in (1, 2, 3)]
        assert all('"type":"abort"' in one.replace(" ", "") for one in found)
        assert not any(answers[number].done() for number in (0, 4, 5))
        http.ok("POST", "/resume")
        rest = [answers[number].result(PATIENCE_S) for number in (0, 4, 5)]
        assert all('"type":"length"' in one.replace(" ", "") for one in rest)
