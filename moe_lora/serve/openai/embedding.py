# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings and POST /pooling: hidden states of last tokens after the final norm."""

from __future__ import annotations

import base64
import math
import sys
import time
from array import array
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from moe_lora.core.request import SamplingParams
from moe_lora.serve.http_errors import JsonResponse, bad_request
from moe_lora.serve.limits import client_of

from .endpoints import CLIENT_GONE, name_request, unless_disconnected
from .generation import Delta, Generation
from .preparing import Preparer, check_prompt
from .prompt_bodies import MAX_INPUTS, EmbeddingRequest, ReadBody, read_body
from .prompt_side import shortened

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, hidden_state=True)


class Endpoints:
    """Methods answer one path each."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend
        self._preparer = preparer

    async def embed(self, request: Request) -> Response:
        """Vectors of length 1, unless the body says otherwise."""
        return await self._answer(request, "embd", "embedding", "embedding", unit=True)

    async def pool(self, request: Request) -> Response:
        """The hidden states as they are, unless the body says otherwise."""
        return await self._answer(request, "pool", "pooling", "data", unit=False)

    async def _answer(self, request: Request, prefix: str, kind: str, key: str, *, unit: bool) -> Response:
        frontend = self._frontend
        found = await read_body(request, EmbeddingRequest, frontend, self._preparer)
        body, prompts = found.body, await self._prompts(found)
        model = frontend.model_name if body.model is None else body.model
        adapter = None if model in frontend.model_names else model
        generation = Generation(
            frontend=frontend,
            client=client_of(request.scope),
            caller=request.state.caller,
            adapter=adapter,
            prompts=prompts,
            answer_tokens=[1] * len(prompts),
            num_choices=1,
            sampling=_SAMPLING,
            tokenizer=None,
            continues_prompt=False,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            timeout_s=body.timeout,
        )
        whole = await unless_disconnected(request.receive, generation.whole())
        if whole is None:
            return Response(status_code=CLIENT_GONE)
        asked = next((one for one in (body.use_activation, body.normalize) if one is not None), unit)
        data = [
            {"object": kind, "index": delta.index, key: _shown(delta, body.encoding_format, unit=asked)}
            for delta in whole
        ]
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        head = {"id": f"{prefix}-{name_request(request, body.request_id)}", "created": int(time.time())}
        shown = adapter or frontend.model_name
        return JsonResponse({**head, "object": "list", "model": shown, "data": data, "usage": usage})

    async def _prompts(self, found: ReadBody) -> list[tuple[int, ...]]:
        info, limits = await self._frontend.client.model_info(), self._frontend.limits
        if len(found.prompts) > MAX_INPUTS:
            what = f"input has {len(found.prompts)} inputs; send at most {MAX_INPUTS} at once"
            raise limits.refusal("choices", bad_request(what, "input"))
        prompts = [tuple(shortened(one, found.body, info, 1)) for one in found.prompts]
        for one in prompts:
            check_prompt(one, _SAMPLING, info)
        num_tokens, most = sum(map(len, prompts)), limits.config.max_request_tokens
        if num_tokens > most:
            what = f"input has {num_tokens} tokens, more than the {most} of one request; send several"
            raise limits.refusal("request_tokens", bad_request(what, "input"))
        return prompts


def _shown(delta: Delta, encoding: str | None, *, unit: bool) -> Any:
    assert delta.prompt is not None
    assert delta.prompt.hidden is not None
    values = array("f", delta.prompt.hidden)
    if sys.byteorder == "big":
        values.byteswap()
    if unit:
        length = math.sqrt(math.fsum(one * one for one in values)) or 1.0
        values = array("f", (one / length for one in values))
    if encoding == "base64":
        return base64.b64encode(values.tobytes()).decode()
    return values.tolist()
