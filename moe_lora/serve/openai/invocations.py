# SPDX-License-Identifier: Apache-2.0
"""POST /invocations, /ping, GET /load of hosts and balancers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moe_lora.serve.http_errors import NOT_JSON, ApiError, JsonResponse, bad_request
from moe_lora.serve.limits import body_of, client_of

from .preparing import INLINE_BYTES, Preparer
from .prompt_bodies import EMBEDDING_ONLY

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
"""Path by a field unique to its body."""


class Forwarded(Response):
    """Another path's answer to the same body."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__()
        self._path, self._body = path, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bodies = [self._body]

        async def again() -> Message:
            if not bodies:
                return await receive()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        inner = {**scope, "path": self._path, "raw_path": self._path.encode()}
        await scope["app"].router(inner, again, send)


class Endpoints:
    """Methods answer one path each."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend
        self._preparer = preparer

    async def invoke(self, request: Request) -> Response:
        """The answer of the body's endpoint."""
        limits = self._frontend.limits
        async with body_of(request, limits, limits.config.max_body_bytes) as content:
            body = bytes(content)
        if len(body) >= INLINE_BYTES:
            path = await self._preparer.elsewhere(client_of(request.scope), path_of, body)
        else:
            path = path_of(body)
        return Forwarded(path, body)

    async def ping(self, request: Request) -> Response:
        """200 while the engine works, else 503."""
        if not await self._frontend.client.is_alive():
            raise ApiError(503, "no engine is running or gets on; see the server's log")
        return Response()

    async def load(self, request: Request) -> Response:
        """The number of running choices."""
        return JsonResponse({"server_load": len(self._frontend.ending.running)})


def path_of(body: bytes) -> str:
    """The body's endpoint.  Raises ApiError."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request("the body is not valid JSON") from None
    if not isinstance(data, dict):
        raise bad_request(NOT_JSON)
    if any(data.get(field) is not None for field in EMBEDDING_ONLY):
        return PATHS["input"]
    for field, path in PATHS.items():
        if field in data:
            return path
    raise bad_request(f"the body has none of {', '.join(PATHS)}; give one")
