# SPDX-License-Identifier: Apache-2.0
"""Chats whose prompt is the token ids of an earlier stage."""

from __future__ import annotations

import sys

import pytest

from .test_completions import CHAT, events

PATH, FILE = "/v1/chat/completions", "moe_lora.serve.openai.forwarded_prompt"
OTHER = [{"role": "user", "content": "quite another text"}]


def forwarded(ids, **fields):
    return {"messages": OTHER, "max_tokens": 3, "kv_transfer_params": {"prompt_token_ids": ids}, **fields}


def test_the_ids_replace_the_messages(server, engine):
    first = server.post(PATH, {"messages": CHAT, "max_tokens": 3, "return_token_ids": True}).json()
    ids = first["prompt_token_ids"]
    again = server.post(PATH, forwarded(ids, return_token_ids=True)).json()
    assert again["prompt_token_ids"] == ids == list(engine.requests[-1].prompt_token_ids)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert (
        events(server, PATH, forwarded(ids, stream=True, return_token_ids=True))[0]["prompt_token_ids"] == ids
    )
    server.post(PATH, {"messages": OTHER, "max_tokens": 3, "kv_transfer_params": {}})
    assert list(engine.requests[-1].prompt_token_ids) != ids


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (forwarded([]), "at least one"),
        (forwarded(5), "a list of token ids"),
        (forwarded([5, True]), "a list of token ids"),
        (forwarded([5, -1]), "out of vocabulary"),
        (forwarded([10**40]), "out of vocabulary"),
        (forwarded([5], echo=True), "read the messages"),
        ({"messages": CHAT, "kv_transfer_params": {"do_remote_prefill": True}}, "do_remote_prefill"),
        (forwarded([5] * 500), "maximum context length"),
    ],
)
def test_other_parameters_are_refused_by_name(server, body, words):
    refused = server.post(PATH, body)
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text


def test_a_chat_of_tokens_is_the_chat_with_these_ids(server, engine):
    first = server.post(PATH, {"messages": CHAT, "max_tokens": 3, "return_token_ids": True}).json()
    body = {"messages": OTHER, "max_tokens": 3, "tokens": first["prompt_token_ids"], "return_token_ids": True}
    again = server.post(f"{PATH}/tokens", body).json()
    assert again["prompt_token_ids"] == first["prompt_token_ids"]
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert events(server, f"{PATH}/tokens", {**body, "stream": True})[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "tokens", "tokens"),
        ({"tokens": []}, "tokens", "at least one"),
        ({"tokens": "5"}, "tokens", "a list of token ids"),
        ({"tokens": [5, 10**9]}, "tokens", "out of vocabulary"),
        ({"tokens": [5], "echo": True}, "tokens", "tokens replaces the messages"),
        ({"tokens": [5], "kv_transfer_params": {"prompt_token_ids": [5]}}, "kv_transfer_params", "leave"),
    ],
)
def test_wrong_tokens_of_a_chat_are_refused_by_name(server, fields, param, words):
    refused = server.post(f"{PATH}/tokens", {"messages": CHAT, "max_tokens": 3, **fields})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param), refused.text
    assert words in error["message"]


def test_lists_of_conversations_and_completions_have_no_such_prompt(server):
    refused = server.post(f"{PATH}/batch", forwarded([5], messages=[CHAT, CHAT]))
    assert (refused.status_code, "read the messages" in refused.text) == (400, True)
    refused = server.post("/v1/completions", {"prompt": "x", "kv_transfer_params": {"prompt_token_ids": [5]}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")


def test_a_plain_chat_enters_no_file_of_forwarded_prompts(server, monkeypatch):
    monkeypatch.delitem(sys.modules, FILE, raising=False)
    assert server.post(PATH, {"messages": CHAT}).status_code == 200
    assert FILE not in sys.modules
