# SPDX-License-Identifier: Apache-2.0
"""POST …/render: the body of /inference/v1/generate."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fastapi import Request
from starlette.responses import Response

from moe_lora.serve.access import caller_of
from moe_lora.serve.anthropic.request import MessagesChat
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request

from .endpoints import name_request, prepared_answer
from .prompt_bodies import check_model
from .protocol import ChatRequest, CompletionRequest, SamplingFields
from .responses.request import PreviousNeeded, ResponsesChat
from .structured import outputs_of
from .token_ids import CONTEXT

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_lora.serve.frontend import Frontend

    from .preparing import Prepared, Preparer

_INTERNAL = ("bad_word_ids", "grammar", "hidden_state", "on_publish", "routed_experts", "thinking")
_NO_RENDERING = ("background", "enable_response_messages")
_ECHOED = "echo is not supported for a rendered prompt; leave echo out"


class _Rendered(SamplingFields):
    renders = True

    return_token_offsets: bool | None = None


class RenderedCompletion(_Rendered, CompletionRequest):
    """Each prompt becomes a body."""

    id_prefix: ClassVar[str] = "cmpl-"


class RenderedChat(_Rendered, ChatRequest):
    """A chat with its tools."""

    id_prefix: ClassVar[str] = "chatcmpl-"

    def without_prompt(self) -> Self:
        return self.model_copy(update={"messages": [], "documents": None})


class RenderedMessages(RenderedChat, MessagesChat):
    id_prefix = "msg_"


class RenderedResponse(RenderedChat, ResponsesChat):
    id_prefix = "resp_"


Rendered: TypeAlias = RenderedCompletion | RenderedChat


class InvalidRequestError(ApiError):
    kind = "invalid_request_error"


class Endpoints:
    """Endpoints of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def completion(self, request: Request) -> Response:
        return await self._render(RenderedCompletion, request)

    async def chat(self, request: Request) -> Response:
        return await self._render(RenderedChat, request)

    async def message(self, request: Request) -> Response:
        return await self._render(RenderedMessages, request)

    async def response(self, request: Request) -> Response:
        """Raises ApiError for a continued response."""
        try:
            return await self._render(RenderedResponse, request)
        except PreviousNeeded:
            what = "previous_response_id is not supported for a rendered prompt; send the whole input"
            raise InvalidRequestError(400, what, "previous_response_id") from None

    async def _render(self, kind: type[Rendered], request: Request) -> Response:
        return await prepared_answer(self._frontend, self._preparer.prepare, kind, self._rendered, request)

    async def _rendered(self, body: Rendered, request: Request) -> Response:
        """Raises ApiError for an unknown model."""
        await check_model(body.model, self._frontend, caller_of(request.scope))
        if body.echo:
            raise bad_request(_ECHOED, "echo")
        given = body.shown if isinstance(body, ResponsesChat) else {}
        for name in _NO_RENDERING:
            if given.get(name):
                raise bad_request(f"{name} is not supported for a rendered prompt; leave it out", name)
        prepared: Prepared = request.state.prepared
        name, num_prompts = name_request(request, body.request_id), len(prepared.prompts)
        common = {**_common(body, prepared), "model": body.model or self._frontend.model_name}
        if body.lora is not None:
            common["lora"] = [one.model_dump() for one in body.lora]
        for field in ("return_routed_experts", "on_publish", "timeout"):
            if (value := getattr(body, field)) is not None:
                common[field] = value
        shown = [
            {
                "request_id": f"{body.id_prefix}{name}" + (f"-{number}" if num_prompts > 1 else ""),
                "token_ids": prompt,
                "token_offsets": None if prepared.offsets is None else prepared.offsets[number],
                **common,
            }
            for number, prompt in enumerate(prepared.prompts)
        ]
        headers = self._frontend.ignored_fields.note(prepared.ignored)
        return JsonResponse(shown if isinstance(body, CompletionRequest) else shown[0], headers=headers)


def _common(body: Rendered, prepared: Prepared) -> dict[str, Any]:
    """Fields for each prompt of the body."""
    sampling = {
        name: value
        for name, value in asdict(prepared.sampling).items()
        if value is not None and name not in _INTERNAL
    }
    sampling["bad_words"] = body.bad_words or ()
    if body.max_tokens == 0:
        sampling["max_tokens"] = 0
    outputs = outputs_of(body)
    if outputs is not None:
        sampling["structured_outputs"] = outputs
    options = None if body.stream_options is None else body.stream_options.model_dump(exclude_none=True)
    context = None
    if isinstance(body, ChatRequest):
        context = {name: value for name in CONTEXT if (value := getattr(body, name)) is not None}
    parsers = prepared.parsers
    return {
        "reasoning_ended": None if parsers is None or not parsers.reasoning else parsers.is_closed,
        "features": None,
        "sampling_params": {**sampling, "n": body.num_choices},
        "stream": bool(body.stream),
        "stream_options": options,
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "return_token_ids": body.return_token_ids,
        "kv_transfer_params": None,
        "parse_context": context,
    }
