# SPDX-License-Identifier: Apache-2.0
"""Request bodies within the limits of route, client and front end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message

from .http_errors import bad_request
from .limits import Limits, client_of

SMALL_BODY_BYTES = 1 << 16
"""Limit for requests that do not generate."""
UNCOUNTED_BYTES = 1 << 14
"""Bytes of each body outside all counts: large bodies never keep out small ones."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@asynccontextmanager
async def body_of(request: Request, limits: Limits, most_bytes: int) -> AsyncIterator[bytearray]:
    """The whole body; bytes beyond `UNCOUNTED_BYTES` count for its client until the context ends.

    Raises ApiError: 413 for more than `most_bytes`, before the read if the length is given; 429 and 503 if
    its client or all clients exceed their bytes in progress.
    """
    client, taken, body = client_of(request.scope), 0, bytearray()

    def take(num_bytes: int) -> None:
        nonlocal taken
        if num_bytes > most_bytes:
            raise limits.body_too_large(most_bytes)
        counted = num_bytes - UNCOUNTED_BYTES
        if counted > taken:
            limits.take_body(client, counted - taken)
            taken = counted

    try:
        said = request.headers.get("content-length", "0")
        take(int(said) if said.isdecimal() else 0)
        async for piece in request.stream():
            take(len(body) + len(piece))
            body += piece
        yield body
    except ClientDisconnect:
        raise bad_request("the connection ended before the body did") from None
    finally:
        limits.bodies.give_back(client, taken)


def bounded_route(limits: Limits, most_bytes: int = SMALL_BODY_BYTES) -> type[APIRoute]:
    """Routes with a limit on the bytes of a body."""

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle

            async def bounded(request: Request) -> Response:
                async with body_of(request, limits, most_bytes) as body:
                    pieces = [bytes(body)]

                async def receive() -> Message:
                    if not pieces:
                        return await request.receive()
                    return {"type": "http.request", "body": pieces.pop(), "more_body": False}

                return await handle(Request(request.scope, receive))

            return bounded

    return BoundedRoute
