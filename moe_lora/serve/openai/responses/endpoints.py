# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses; stored responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from moe_lora.core.request import ModelInfo
from moe_lora.serve.access import caller_of
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.openai.endpoints import answer, prepared_answer
from moe_lora.serve.openai.preparing import Prepared, Preparer

from .answer import ResponseFormat
from .request import ContinuedChat, PreviousNeeded, ResponsesChat
from .store import ResponseStore

if TYPE_CHECKING:
    from .background import Runs


@dataclass
class Continuing:
    """Prepares new and continued responses."""

    preparer: Preparer
    messages_of: Callable[[str], bytes]
    most_bytes: int

    async def prepare(self, kind: Any, content: bytearray, info: ModelInfo, scope: Scope) -> Prepared:
        try:
            return await self.preparer.prepare(kind, content, info, scope)
        except PreviousNeeded as needed:
            try:
                previous = self.messages_of(needed.message)
            except ApiError as error:
                raise error.renamed({"response_id": "previous_response_id"}) from None
        text = bytes(content).decode(json.detect_encoding(content), "surrogatepass")
        both = bytearray(b'{"previous":%s,"body":%s}' % (previous, text.encode("utf-8", "surrogatepass")))
        if len(both) > self.most_bytes:
            what = f"the conversation has {len(both)} bytes, and a body may have {self.most_bytes}"
            raise ApiError(413, f"{what}; begin a new conversation, or send its end as input", "input")
        return await self.preparer.prepare(ContinuedChat, both, info, scope)


class Endpoints:
    """Endpoints and responses of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer
        self._store = ResponseStore()
        self._runs: Runs | None = None

    async def create(self, request: Request) -> Response:
        owner, most = _owner(request), self._frontend.limits.config.max_body_bytes
        continuing = Continuing(self._preparer, partial(self._messages_of, owner), most)
        return await prepared_answer(self._frontend, continuing.prepare, ResponsesChat, self._answer, request)

    async def _answer(self, body: ResponsesChat, request: Request) -> Response:
        assert self._frontend.tokenizer is not None
        if caller_of(request.scope).background and not body.shown["store"]:
            body.shown["input"] = None  # a file has a batch's answers
        form = self._format(body)(
            self._frontend.tokenizer, request.state.prepared, self._store, _owner(request)
        )
        return await answer(self._frontend, request, form)

    def _format(self, body: ResponsesChat) -> Callable[..., ResponseFormat]:
        """The kind of answer; imports a rare kind."""
        if body.shown["background"]:
            from .background import BackgroundFormat, Runs

            self._runs = self._runs or Runs(self._store)
            return partial(BackgroundFormat, self._runs)
        if body.shown["enable_response_messages"]:
            from .raw_messages import RawFormat

            return RawFormat
        return ResponseFormat

    def _messages_of(self, owner: str, response_id: str) -> bytes:
        """Messages of a stored response.  Raises ApiError without a conversation."""
        running = self._running(owner, response_id)
        stored = None if running else self._store.get(owner, response_id)
        if stored is not None and stored.messages:
            return stored.messages
        status = (running or json.loads(stored.answer if stored else b""))["status"]
        what = f"the response {response_id} is {status}, and only a completed response is continued"
        raise bad_request(f"{what}; send the whole conversation as input", "previous_response_id")

    def _running(self, owner: str, response_id: str) -> dict[str, Any] | None:
        return None if self._runs is None else self._runs.get(owner, response_id)

    async def read(self, request: Request) -> Response:
        """A running or stored response."""
        for name in ("stream", "starting_after", "include", "include[]", "include_obfuscation"):
            if request.query_params.get(name) not in (None, "", "false"):
                name = name.removesuffix("[]")
                raise bad_request(f"{name} is not supported for a stored response; leave it out", name)
        owner, response_id = _owner(request), request.path_params["response_id"]
        running = self._running(owner, response_id)
        if running is not None:
            return JsonResponse(running)
        return Response(self._store.get(owner, response_id).answer, media_type="application/json")

    async def remove(self, request: Request) -> Response:
        """Cancels and deletes a response."""
        owner, response_id = _owner(request), request.path_params["response_id"]
        if self._runs is not None:
            await self._runs.cancel(owner, response_id)
        self._store.remove(owner, response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """The cancelled response; an ended response is unchanged."""
        owner, response_id = _owner(request), request.path_params["response_id"]
        if self._runs is not None:
            await self._runs.cancel(owner, response_id)
        stored = self._store.get(owner, response_id)
        if json.loads(stored.answer)["background"]:
            return Response(stored.answer, media_type="application/json")
        what = "Cannot cancel a synchronous response. The response has ended"
        raise bad_request(f"{what}; a closed connection ends a running response", "response_id")


def _owner(request: Request) -> str:
    """The key's id; without keys all responses have one owner."""
    caller = caller_of(request.scope)
    return "" if caller.key is None else caller.key.id
