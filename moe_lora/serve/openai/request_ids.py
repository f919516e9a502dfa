"""What a request is called: `X-Request-Id` and the body's `request_id`."""

from __future__ import annotations

import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"


class RequestIds:
    """Answers every HTTP request with the `X-Request-Id` it came with, or with a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        given = Request(scope).headers.get(HEADER)
        state["request_id_given"] = bool(given)
        state["request_id"] = given or uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        await self._app(scope, receive, named)


def name_request(request: Request, request_id: str | None) -> str:
    """The request's id, for its answer: that of the header, else `request_id`, else a new one (as in vLLM).

    request_id: of the body; what is no header's text is only in the answer's body.
    """
    state = request.state
    if request_id is None or state.request_id_given:
        return state.request_id
    if request_id.isascii() and request_id.isprintable() and request_id == request_id.strip():
        state.request_id = request_id
    return request_id
