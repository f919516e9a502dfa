# SPDX-License-Identifier: Apache-2.0
"""Answers that a pause or an abort of a trainer ends: each interface says so, and no client gets a 500."""

from __future__ import annotations

import json

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
