"""What the two generating endpoints share in answering: whole answers, and streams of chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_lora.core.request import TokenLogprobs
from moe_lora.serve.http_errors import JsonResponse

from .generation import CLIENT_GONE, Delta, EventStream, Generation, unless_disconnected

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer


class UsageInStream(Enum):
    """Which events of a stream have a `usage`: none, one of its own at the end, or all."""

    NEVER = "never"
    AT_END = "at_end"
    ALWAYS = "always"


class ChoiceFormat(Protocol):
    """One endpoint's form of choices, for one request."""

    object_name: str
    chunk_object_name: str

    def chunk(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices entries that a delta makes in a stream (one event each)."""
        ...

    def whole(self, delta: Delta) -> dict[str, Any]:
        """The choices entry of a finished choice, its deltas joined to one."""
        ...


async def answer(
    request: Request,
    generation: Generation,
    form: ChoiceFormat,
    *,
    model: str,
    stream: bool,
    usage: UsageInStream,
) -> Response:
    """Run the generation for this client; the engine stops working on it when the client leaves."""
    head = {"id": generation.plan.request_id, "created": int(time.time()), "model": model}
    if stream:
        head["object"] = form.chunk_object_name
        return EventStream(_events(generation, form, head, usage))
    joined = await unless_disconnected(request.receive, _join(generation))
    if joined is None:
        return Response(status_code=CLIENT_GONE)
    choices = [form.whole(joined[index]) for index in sorted(joined)]
    head["object"] = form.object_name
    return JsonResponse({**head, "choices": choices, "usage": generation.usage()})


async def _events(
    generation: Generation, form: ChoiceFormat, head: dict[str, Any], usage: UsageInStream
) -> AsyncGenerator[str, None]:
    """Chunks as event texts.  Only the choice, and its usage if asked for, is encoded per token; what
    surrounds it is made once."""
    opening = f'data: {json.dumps(head)[:-1]}, "choices": ['
    closing = "]}\n\n" if usage is UsageInStream.NEVER else '], "usage": null}\n\n'
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            if usage is UsageInStream.ALWAYS:
                closing = f'], "usage": {json.dumps(generation.usage_of(delta.index))}}}\n\n'
            yield "".join([f"{opening}{json.dumps(choice)}{closing}" for choice in form.chunk(delta)])
    if usage is not UsageInStream.NEVER:
        yield f'{opening}], "usage": {json.dumps(generation.usage())}}}\n\n'


async def _join(generation: Generation) -> dict[int, Delta]:
    """The deltas of each choice joined to one."""
    parts: dict[int, list[Delta]] = {}
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            parts.setdefault(delta.index, []).append(delta)
    return {index: _joined(deltas_of_choice) for index, deltas_of_choice in parts.items()}


def _joined(deltas: list[Delta]) -> Delta:
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=logprobs,
        finish_reason=deltas[-1].finish_reason,
    )


# Log probabilities in the forms of the two generating endpoints.


LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The token alone as text; "token_id:7" where there is no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.decode([token_id], skip_special_tokens=False)


class CompletionLogprobs:
    """Collects `choices[].logprobs` of /v1/completions; text_offset counts from the answer's start."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The entry for tokens that follow those taken before."""
        entry: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, chosen in zip(token_ids, logprobs, strict=True):
            text = token_text(self._tokenizer, token_id)
            likeliest = {
                token_text(self._tokenizer, other): _finite(logprob) for other, logprob in chosen.top
            }
            entry["tokens"].append(text)
            entry["token_logprobs"].append(_finite(chosen.logprob))
            entry["top_logprobs"].append({**likeliest, text: _finite(chosen.logprob)})
            entry["text_offset"].append(self._offset)
            self._offset += len(text)
        return entry


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, list[dict[str, Any]]]:
    """`choices[].logprobs` of /v1/chat/completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    content = [
        {
            **entry(token_id, chosen.logprob),
            "top_logprobs": [entry(other, logprob) for other, logprob in chosen.top],
        }
        for token_id, chosen in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


# What a request is called: `X-Request-Id` and the body's `request_id`.


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
