# SPDX-License-Identifier: Apache-2.0
"""A server with tokens_only takes and gives token ids, without the model's tokenizer."""

from __future__ import annotations

import httpx
import pytest

from .demo_server import demo_server

IDS = [1, 40, 41]
LIMITS = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
REFUSED = [
    ("/v1/completions", {"prompt": "hello"}, "a text prompt needs a tokenizer"),
    ("/v1/completions", {"prompt": IDS, "stop": "x"}, "a list of stop strings needs a tokenizer"),
    ("/v1/completions", {"prompt": IDS, "regex": "a+"}, "regex needs a tokenizer"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "needs a tokenizer"),
    ("/inference/v1/generate", {"token_ids": IDS, "output_mode": "text"}, "requires a tokenizer"),
    ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"stop": "x"}}, "stop strings needs"),
]


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    log = tmp_path_factory.mktemp("ids") / "log"
    with demo_server(log, "--tokens-only", "--eager") as server, httpx.Client(base_url=server.url) as client:
        yield client


def test_token_ids_are_answered_with_token_ids(http):
    plain = http.post("/v1/completions", json={"prompt": IDS, **LIMITS}).json()["choices"][0]
    assert len(plain["token_ids"]) == 5
    found = http.post("/inference/v1/generate", json={"token_ids": IDS, "sampling_params": LIMITS}).json()
    assert found["choices"][0]["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(("path", "body", "reason"), REFUSED)
def test_texts_are_refused(http, path, body, reason):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
    assert "this server has none" in answer.json()["error"]["message"]


def test_there_is_no_tokenizer_to_ask(http):
    assert http.get("/tokenizer_info").status_code == 404
