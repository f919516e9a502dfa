# SPDX-License-Identifier: Apache-2.0
"""A second tenant's key comes while eight requests of the first tenant stream: their tokens stay the same."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.patience import PATIENCE_S

from .demo_server import demo_server, few_adapters
from .served_tenants import new_key

STREAMS, TOKENS = 8, 48
MODELS = ("model", "upper", "reverse", "rot13")


@contextlib.contextmanager
def client_of(url: str, key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False) as http:
        yield http


def body_of(number: int, **fields: object) -> dict[str, object]:
    model = MODELS[number % len(MODELS)]
    prompt = list(range(20 + number, 40 + 2 * number))
    return {
        "model": "demo" if model == "model" else model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def streamed(http: httpx.Client, number: int, has_begun: threading.Barrier | None) -> list[int]:
    """The answer's token ids; waits for all streams at the first token."""
    found: list[int] = []
    with http.stream("POST", "/v1/completions", json=body_of(number, stream=True)) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                is_first = not found
                found += json.loads(line[6:])["choices"][0]["token_ids"]
                if is_first and has_begun is not None:
                    has_begun.wait(PATIENCE_S)
    return found


def test_second_tenant_by_a_new_key_changes_no_tokens(tmp_path):
    file = tmp_path / "keys.json"
    first = new_key(file, "first", "--adapters", "*")
    options = ["--api-keys", str(file), *few_adapters(*MODELS[1:]), "--eager"]
    options += ["--max-num-seqs", str(STREAMS), "--dtype", "float32"]
    with (
        demo_server(tmp_path / "log", *options) as server,
        client_of(server.url, first) as http,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        alone = list(pool.map(lambda number: streamed(http, number, None), range(STREAMS)))
        assert {len(tokens) for tokens in alone} == {TOKENS}

        has_begun = threading.Barrier(STREAMS + 1)
        running = [pool.submit(streamed, http, number, has_begun) for number in range(STREAMS)]
        has_begun.wait(PATIENCE_S)
        second = new_key(file, "second", "--adapters", "*")
        with client_of(server.url, second) as other:
            found = accepted(other, body_of(3, max_tokens=8))
        assert found.json()["choices"][0]["token_ids"] == alone[3][:8]
        assert [one.result() for one in running] == alone


def accepted(http: httpx.Client, body: dict[str, object]) -> httpx.Response:
    """The answer once the server has read the new key."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        found = http.post("/v1/completions", json=body)
        if found.status_code != 401:
            assert found.status_code == 200, found.text
            return found
        time.sleep(0.05)
    pytest.fail("the server did not read the new key")
