# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses; stored responses: GET, DELETE, cancel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from moe_lora.core.request import ModelInfo
from moe_lora.serve.access import Caller, caller_of
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.openai.converted import renaming
from moe_lora.serve.openai.endpoints import answer, prepared_answer
from moe_lora.serve.openai.preparing import Prepared, Preparer

from .answer import ResponseFormat
from .request import CHAT_NAMES, ContinuedChat, PreviousNeeded, ResponsesChat
from .store import ResponseStore


@dataclass
class Continuing:
    """Prepares responses of one owner, after a stored response too.  most_bytes: of a conversation."""

    preparer: Preparer
    store: ResponseStore
    owner: str
    most_bytes: int

    async def prepare(self, kind: Any, content: bytearray, info: ModelInfo, scope: Scope) -> Prepared:
        try:
            return await self.preparer.prepare(kind, content, info, scope)
        except PreviousNeeded as needed:
            previous = self.store.get(self.owner, needed.message).messages
        text = bytes(content).decode(json.detect_encoding(content), "surrogatepass")
        both = bytearray(b'{"previous":%s,"body":%s}' % (previous, text.encode("utf-8", "surrogatepass")))
        if len(both) > self.most_bytes:
            what = f"the conversation has {len(both)} bytes, and a body may have {self.most_bytes}"
            raise ApiError(413, f"{what}; begin a new conversation, or send its end as input", "input")
        return await self.preparer.prepare(ContinuedChat, both, info, scope)


class Endpoints:
    """The endpoints of one front end, and its stored responses."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response:
        owner, most = _owner(caller_of(request.scope)), self._frontend.limits.config.max_body_bytes
        continuing = Continuing(self._preparer, self._store, owner, most)
        with renaming(CHAT_NAMES):
            return await prepared_answer(
                self._frontend, continuing.prepare, ResponsesChat, self._answer, request
            )

    async def _answer(self, body: ResponsesChat, request: Request) -> Response:
        assert self._frontend.tokenizer is not None
        owner = _owner(caller_of(request.scope))
        form = ResponseFormat(self._frontend.tokenizer, request.state.prepared, self._store, owner)
        return await answer(self._frontend, request, form)

    async def read(self, request: Request) -> Response:
        """A stored response."""
        for name in ("stream", "starting_after", "include", "include_obfuscation"):
            if request.query_params.get(name) not in (None, "", "false"):
                raise bad_request(f"{name} is not supported for a stored response; leave it out", name)
        stored = self._store.get(_owner(caller_of(request.scope)), request.path_params["response_id"])
        return Response(stored.answer, media_type="application/json")

    async def remove(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._store.remove(_owner(caller_of(request.scope)), response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Stored responses have ended: background is not supported."""
        self._store.get(_owner(caller_of(request.scope)), request.path_params["response_id"])
        what = "the response has ended; to end a running response, close its connection"
        raise bad_request(what, "response_id")


def _owner(caller: Caller) -> str:
    """A key reads its own responses; without keys all responses have one owner."""
    return "" if caller.key is None else caller.key.id
