# SPDX-License-Identifier: Apache-2.0
"""A client that leaves takes its work with it."""

from __future__ import annotations

import httpx
import pytest

from .conftest import scripted, serving
from .live_server import wait_until

LONG = {"prompt": "hello", "ignore_eos": True, "max_tokens": 100}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "max_tokens": 100}


@pytest.fixture
def slow_engine(tokenizer):
    return scripted(tokenizer, step_s=0.05)


@pytest.fixture
def slow_server(slow_engine, tokenizer):
    with serving(slow_engine, tokenizer) as served:
        yield served


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_cancels_its_requests(slow_server, slow_engine, path, n):
    body = {**(LONG if path == "/v1/completions" else CHAT), "n": n, "stream": True}
    with slow_server.http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: len(slow_engine.running) == n, "all choices run")
    wait_until(lambda: not slow_engine.running, "the requests are cancelled")
    assert len(slow_engine.aborted) == n
    assert slow_engine.num_tokens < 100


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_before_a_whole_answer_cancels_its_requests(slow_server, slow_engine, n):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow_server.url}/v1/completions", json={**LONG, "n": n}, timeout=0.3)
    wait_until(
        lambda: len(slow_engine.aborted) == n and not slow_engine.running, "the requests are cancelled"
    )
    assert slow_engine.num_tokens < 100 * n


def test_the_others_go_on_and_the_cancelled_is_counted(slow_server, slow_engine):
    with slow_server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
    assert slow_server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3}).status_code == 200
    wait_until(lambda: not slow_engine.running, "the request is cancelled")
    assert 'finished_reason="abort"' in slow_server.get("/metrics").text
