# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from moe_lora.core.request import ModelInfo
from moe_lora.serve.access import caller_of
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import JsonResponse
from moe_lora.serve.openai.converted import renaming
from moe_lora.serve.openai.endpoints import answer, prepared_answer
from moe_lora.serve.openai.preparing import Prepared, Preparer
from moe_lora.serve.openai.prompt_bodies import check_model, check_total

from .answer import MessageFormat
from .request import CHAT_NAMES, CountedChat, MessagesChat

MAX_COUNTED_TOKENS = 1 << 40
"""Replaces the context's length for counts."""


class Endpoints:
    """The endpoints of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def create(self, request: Request) -> Response:
        with renaming(CHAT_NAMES):
            return await prepared_answer(
                self._frontend, self._preparer.prepare, MessagesChat, self._answer, request
            )

    async def count(self, request: Request) -> Response:
        """Tokens of the prompt, also beyond the context."""
        with renaming(CHAT_NAMES):
            return await prepared_answer(self._frontend, self._prepare, CountedChat, self._counted, request)

    async def _answer(self, body: MessagesChat, request: Request) -> Response:
        assert self._frontend.tokenizer is not None
        form = MessageFormat(self._frontend.tokenizer, request.state.prepared)
        return await answer(self._frontend, request, form)

    async def _prepare(self, kind: Any, content: bytearray, info: ModelInfo, scope: Scope) -> Prepared:
        return await self._preparer.prepare(
            kind, content, replace(info, max_model_len=MAX_COUNTED_TOKENS), scope
        )

    async def _counted(self, body: MessagesChat, request: Request) -> Response:
        """Raises ApiError for a model without this name."""
        prepared: Prepared = request.state.prepared
        await check_model(body.model, self._frontend, caller_of(request.scope))
        num_tokens = len(prepared.prompts[0])
        check_total(num_tokens, self._frontend.limits, "messages")
        headers = self._frontend.ignored_fields.note(prepared.ignored)
        return JsonResponse({"input_tokens": num_tokens}, headers=headers)
