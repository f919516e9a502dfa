# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on a free port, in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_lora.config import LimitsConfig
from moe_lora.serve.limits import Limits
from moe_lora.serve.server import HttpServer
from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class Served:
    """What a test of the interface may know of a server."""

    url: str
    model: str
    adapter: str
    max_model_len: int
    vocab_size: int

    http: httpx.Client

    def post(self, path: str, body: object) -> httpx.Response:
        """POST as JSON; unlike httpx's own encoding, this can send lone surrogates."""
        return self.post_raw(path, json.dumps(body).encode())

    def post_raw(self, path: str, content: bytes) -> httpx.Response:
        return self.http.post(path, content=content, headers={"Content-Type": "application/json"})

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    @classmethod
    @contextlib.contextmanager
    def at(
        cls, url: str, model: str, adapter: str, *, max_model_len: int, vocab_size: int
    ) -> Iterator[Served]:
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            yield cls(url, model, adapter, max_model_len, vocab_size, http)


class Switch:
    """An ASGI application that stands for another one, so that many apps can share one server."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)


class ServerThread:
    """Context manager; `url` is set inside."""

    def __init__(self, app: ASGIApp, limits: Limits | None = None) -> None:
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = HttpServer(config, limits or Limits(LimitsConfig()))
        self._ready = threading.Event()
        self._server.on_ready = lambda _: self._ready.set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> ServerThread:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S), "the server did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        self._thread.join(PATIENCE_S)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll ever more rarely for up to PATIENCE_S, then fail with the event that is missing."""
    deadline_s, pause_s = time.monotonic() + PATIENCE_S, 0.01
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.05)


def completion_events(url: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a streamed completion; none is an error."""
    given = {**body, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=given, timeout=PATIENCE_S, trust_env=False
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event
