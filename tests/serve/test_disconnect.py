# SPDX-License-Identifier: Apache-2.0
"""A client that leaves takes its work with it."""

from __future__ import annotations

import json

import pytest

from .conftest import scripted, serving
from .live_server import wait_until
from .test_limits import START, connect

LONG = {"prompt": "hello", "ignore_eos": True, "max_tokens": 100}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "max_tokens": 100}


@pytest.fixture
def hanging_engine(tokenizer):
    """No answer ends by itself."""
    return scripted(tokenizer, hang_after=5)


@pytest.fixture
def hanging_server(hanging_engine, tokenizer):
    with serving(hanging_engine, tokenizer) as served:
        yield served


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_cancels_its_requests(hanging_server, hanging_engine, path, n):
    body = {**(LONG if path == "/v1/completions" else CHAT), "n": n, "stream": True}
    with hanging_server.http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: len(hanging_engine.running) == n, "all choices run")
    wait_until(lambda: not hanging_engine.running, "the requests are cancelled")
    assert len(hanging_engine.aborted) == n


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_before_a_whole_answer_cancels_its_requests(hanging_server, hanging_engine, n):
    body = json.dumps({**LONG, "n": n}).encode()
    with connect(hanging_server) as client:
        client.sendall(START + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: len(hanging_engine.running) == n, "all choices run")
    wait_until(
        lambda: len(hanging_engine.aborted) == n and not hanging_engine.running, "the requests are cancelled"
    )


def test_the_others_go_on_and_the_cancelled_is_counted(hanging_server, hanging_engine):
    with hanging_server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
    wait_until(lambda: not hanging_engine.running, "the request is cancelled")
    hanging_engine.hang_after = None
    assert hanging_server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3}).status_code == 200
    assert 'finished_reason="abort"' in hanging_server.get("/metrics").text
