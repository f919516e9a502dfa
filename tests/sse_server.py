# SPDX-License-Identifier: Apache-2.0
"""A server of the OpenAI completion protocol for tests of clients: no model, answers known beforehand.

"reverse" gives the prompt reversed, one character a chunk; other models give as many tokens as asked for.
Special prompts: "error" HTTP 503, "broken" an error in the stream, "cut" a stream that breaks off, "hang" no
end, "pair" waits until a second request has come, "silent" one token without text.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

MODELS = [{"id": "base"}, {"id": "reverse", "parent": "base"}, {"id": "other", "parent": "base"}]


@dataclass
class Served:
    """What the server saw: request bodies, and when it received each and gave out its first token."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    received_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


def make_app(served: Served) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": MODELS}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        served.received_s.append(time.perf_counter())
        served.bodies.append(body)
        if body["prompt"] == "error":
            return JSONResponse({"error": {"message": "overloaded", "type": "x"}}, status_code=503)
        return StreamingResponse(stream(body, served), media_type="text/event-stream")

    return app


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def stream(body: dict[str, Any], served: Served) -> AsyncIterator[str]:
    prompt = body["prompt"]
    text = (
        prompt[::-1] if body["model"] == "reverse" and isinstance(prompt, str) else "t" * body["max_tokens"]
    )
    text = text[: body["max_tokens"]]
    yield ": a comment line, as some servers send to keep connections open\n\n"
    await asyncio.sleep(0.02)
    while prompt == "pair" and len(served.bodies) < 2:
        await asyncio.sleep(0.005)
    served.first_token_s.append(time.perf_counter())
    for character in text if prompt != "silent" else "":
        yield event({"choices": [{"index": 0, "text": character, "finish_reason": None}]})
        await asyncio.sleep(0.002)
        if prompt == "broken":
            yield event({"error": {"message": "engine died", "code": 500}})
            return
        if prompt == "cut":
            return
        if prompt == "hang":
            await asyncio.sleep(3600)
    yield event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    usage: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": 1 if prompt == "silent" else len(text),
    }
    if body["model"] != "other":
        usage["timing"] = {"decode_ttft_ms": 12.5, "queue_ms": 2.0, "adapter_load_ms": 0.5}
    yield event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


@contextmanager
def running_server() -> Iterator[Served]:
    """The server in a thread, on a free port, until the block ends."""
    served = Served()
    config = uvicorn.Config(make_app(served), port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the test server did not start")
        time.sleep(0.01)
    served.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join(timeout=10)
