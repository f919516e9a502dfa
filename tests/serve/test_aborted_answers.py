# SPDX-License-Identifier: Apache-2.0
"""Answers that a pause or an abort of a trainer ends: each interface says so, and no client gets a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_lora.serve.frontend import ABORTED

PROMPT = {"prompt": "hello"}
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}),
        ("/pooling", {"input": "a"}),
        (COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 1}),
        (COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}),
        (COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 1, "n": 2}),
        (COMPLETIONS, {**PROMPT, "prompt_logprobs": 1}),
        (COMPLETIONS, {**PROMPT, "echo": True, "prompt_logprobs": 1, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1}),
    ],
)
def test_an_abort_before_the_prompt_s_numbers_is_a_503(server, engine, path, body):
    engine.cuts = [0] * 2
    answer = server.post(path, body)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["message"], error["code"], error["type"]) == (ABORTED, 503, "ServiceUnavailableError")


def test_an_abort_before_a_streamed_echo_s_numbers_is_an_error_event(server, engine):
    engine.cuts = [0]
    text = server.post(COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 1, "stream": True}).text
    first, last = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert json.loads(first)["error"]["message"] == ABORTED
    assert last == "[DONE]"


def test_an_aborted_completion_has_the_reason_and_its_text(server, engine):
    for num_tokens, text in ((0, ""), (5, "hello")):
        engine.cuts = [num_tokens]
        [choice] = server.post(COMPLETIONS, PROMPT).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "abort")
    engine.cuts = [0]
    [choice] = server.post(COMPLETIONS, {**PROMPT, "echo": True}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "abort")


@pytest.mark.parametrize("cuts", [[0], [9, 0]])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**PROMPT, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_all_choices_of_an_aborted_beam_search_have_the_reason(server, engine, path, body, cuts):
    engine.cuts = [*cuts]
    answer = server.post(path, {**body, "use_beam_search": True, "n": 2})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [(one["index"], one["finish_reason"]) for one in choices] == [(0, "abort"), (1, "abort")]


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_aborted_message_is_an_error(server, engine, num_tokens):
    engine.cuts = [num_tokens] * 2
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    answer = server.post("/v1/messages", body)
    failure = {"type": "error", "error": {"type": "overloaded_error", "message": ABORTED}}
    assert (answer.status_code, answer.json()) == (503, failure)
    *others, last = events(server.post("/v1/messages", {**body, "stream": True}).text)
    assert last == failure
    assert {"message_delta", "message_stop"}.isdisjoint(one["type"] for one in others)
    assert [one["delta"]["text"] for one in others if "delta" in one] == [*"hello"[:num_tokens]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_aborted_response_is_cancelled_and_not_stored(server, engine, num_tokens, stream):
    engine.cuts = [num_tokens]
    answer = server.post("/v1/responses", {"input": "hello", "stream": stream})
    assert answer.status_code == 200
    found = answer.json() if not stream else events(answer.text)[-1]["response"]
    assert (found["status"], found["incomplete_details"], found["store"]) == ("cancelled", None, False)
    [item] = found["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "hello"[:num_tokens])
    assert server.get(f"/v1/responses/{found['id']}").status_code == 404
    if stream:
        assert events(answer.text)[-1]["type"] == "response.incomplete"
        assert events(answer.text)[-2]["item"] == item


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
