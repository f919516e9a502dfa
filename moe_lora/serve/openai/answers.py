"""What the two generating endpoints share in answering: whole answers, and streams of chunks."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import Enum
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from moe_lora.serve.http_errors import JsonResponse
from .generation import Delta, Generation
from .streaming import CLIENT_GONE, EventStream, unless_disconnected


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
