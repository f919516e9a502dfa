# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions/batch: several conversations, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Request
from pydantic import Field, model_validator
from starlette.responses import Response

from moe_lora.serve.http_errors import bad_request

from .endpoints import ChatFormat, answer, chat_format, prepared_answer
from .fields import FieldError
from .generation import Delta
from .prompt_side import PromptChat
from .protocol import ChatMessage, ChatRequest, Listed

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_lora.serve.frontend import Frontend

    from .parsers.choice import AnswerParsers
    from .preparing import Prepared, Preparer

_REFUSED = ("stream", "tools", "prompt_logprobs")


class BatchChat(ChatRequest):
    """Conversations as `messages`, with common other fields."""

    messages: Annotated[  # type: ignore[assignment]
        Listed[Annotated[Listed[ChatMessage], Field(min_length=1)]], Field(min_length=1)
    ]

    @property
    def conversations(self) -> Sequence[ChatRequest]:
        return [self.model_copy(update={"messages": one}) for one in self.messages]

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        for name in _REFUSED:
            if getattr(self, name) not in (None, False, []):
                what = f"{name} is not supported for lists of conversations; leave {name} out"
                raise FieldError(name, f"{what}, or send the chats to /v1/chat/completions")
        if self.num_choices > 1:
            raise FieldError("n", f"n={self.n} is not supported for lists of conversations; n must be 1")
        return self


class BatchFormat(ChatFormat):
    """Choices in the format of their conversations."""

    def __init__(self, forms: Sequence[ChatFormat]) -> None:
        self.text = forms[0].text
        self._forms = forms

    def show_at_end(self, name: str, value_of: Callable[[int], object]) -> None:
        for form in self._forms:
            form.show_at_end(name, value_of)

    def beside(self, index: int) -> dict[str, Any]:
        return {}

    def whole(self, delta: Delta) -> dict[str, Any]:
        return self._forms[delta.index].whole(delta)


class Endpoints:
    """Endpoint of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def create(self, request: Request) -> Response:
        return await prepared_answer(self._frontend, self._preparer.prepare, BatchChat, self._answer, request)

    async def _answer(self, body: BatchChat, request: Request) -> Response:
        prepared: Prepared = request.state.prepared
        forms = [chat_format(body, self._frontend, one) for one in self._parsers(body, prepared)]
        if body.echo:
            forms = [PromptChat(form, prepared) for form in forms]
        return await answer(self._frontend, request, BatchFormat(forms))

    def _parsers(self, body: BatchChat, prepared: Prepared) -> list[AnswerParsers | None]:
        """Parsers by conversation.

        Raises ApiError for a grammar or budget with reasoning in different states.
        """
        parsers, tokenizer = prepared.parsers, self._frontend.tokenizer
        if parsers is None or tokenizer is None:
            return [None] * len(prepared.prompts)
        from .parsers.choice import begun

        found = [
            replace(parsers, **begun(parsers.reasoning, prompt, tokenizer, body))
            for prompt in prepared.prompts
        ]
        depends = prepared.sampling.grammar is not None or body.thinking_token_budget not in (None, -1)
        if depends and any(one != parsers for one in found):
            what = "a grammar or thinking_token_budget depends on the reasoning, and the conversations end "
            what += "within and after reasoning; send the chats to /v1/chat/completions"
            raise bad_request(what, "messages")
        return list(found)
