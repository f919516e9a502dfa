# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings and POST /pooling: hidden states of last tokens after the final norm."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fastapi import Request
from starlette.responses import Response

from moe_lora.core.request import SamplingParams
from moe_lora.serve.http_errors import JsonResponse, bad_request, to_json

from .endpoints import CLIENT_GONE, ChoiceFormat, answer, unless_disconnected
from .generation import Delta, Generation
from .preparing import Prepared, Preparer, check_prompt
from .prompt_bodies import MAX_INPUTS, EmbeddingRequest, ReadBody, read_body
from .prompt_side import in_slices, shortened

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, hidden_state=True)


class EmbeddingFormat(ChoiceFormat):
    """A list of vectors.  is_unit: of length 1; None: as usual."""

    id_prefix = "embd-"
    object_name, key, is_unit = "embedding", "embedding", True

    def __init__(self, *, is_unit: bool | None, in_base64: bool) -> None:
        super().__init__(None, with_token_ids=False)
        if is_unit is not None:
            self.is_unit = is_unit
        self._in_base64 = in_base64

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        """The vectors of the prompts, encoded in slices."""
        data = await unless_disconnected(request.receive, self._data(generation))
        if data is None:
            return Response(status_code=CLIENT_GONE)
        num_tokens = sum(map(len, generation.prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        return JsonResponse({**head, "object": "list", "data": data, "usage": usage}, headers=headers)

    async def _data(self, generation: Generation) -> msgspec.Raw:
        return await in_slices(self._parts(await generation.whole()))

    def _parts(self, whole: Sequence[Delta]) -> Iterator[bytes]:
        opening = b"["
        for delta in whole:
            entry = {"object": self.object_name, "index": delta.index, self.key: self._vector(delta)}
            yield opening + to_json(entry)
            opening = b","
        yield b"]"

    def _vector(self, delta: Delta) -> Any:
        assert delta.prompt is not None
        assert delta.prompt.hidden is not None
        values = np.frombuffer(delta.prompt.hidden, "<f4")
        if self.is_unit:
            values = (values / (np.linalg.norm(values.astype(np.float64)) or 1.0)).astype("<f4")
        return base64.b64encode(values.tobytes()).decode() if self._in_base64 else values.tolist()


class PoolingFormat(EmbeddingFormat):
    """A list of hidden states."""

    id_prefix = "pool-"
    object_name, key, is_unit = "pooling", "data", False


class Endpoints:
    """Methods answer one path each."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend
        self._preparer = preparer

    async def embed(self, request: Request) -> Response:
        """Vectors of length 1, unless the body says otherwise."""
        return await self._answer(request, EmbeddingFormat)

    async def pool(self, request: Request) -> Response:
        """The hidden states as they are, unless the body says otherwise."""
        return await self._answer(request, PoolingFormat)

    async def _answer(self, request: Request, form: type[EmbeddingFormat]) -> Response:
        frontend = self._frontend
        found = await read_body(request, EmbeddingRequest, frontend, self._preparer)
        prompts = await self._prompts(found)
        request.state.prepared = Prepared(
            body=found.body,
            sampling=_SAMPLING,
            prompts=prompts,
            answer_tokens=[1] * len(prompts),
            ignored=found.ignored,
        )
        body: EmbeddingRequest = found.body
        is_unit = body.normalize if body.use_activation is None else body.use_activation
        in_base64 = body.encoding_format == "base64"
        return await answer(frontend, request, form(is_unit=is_unit, in_base64=in_base64))

    async def _prompts(self, found: ReadBody) -> list[tuple[int, ...]]:
        info, limits = await self._frontend.client.model_info(), self._frontend.limits
        if len(found.prompts) > MAX_INPUTS:
            what = f"input has {len(found.prompts)} inputs; send at most {MAX_INPUTS} at once"
            raise limits.refusal("choices", bad_request(what, "input"))
        prompts = [tuple(shortened(one, found.body, info, 1)) for one in found.prompts]
        for one in prompts:
            check_prompt(one, _SAMPLING, info)
        return prompts
