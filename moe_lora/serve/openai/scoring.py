# SPDX-License-Identifier: Apache-2.0
"""POST /v1/score, as in SGLang: each label's probability after query and item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from fastapi import Request
from pydantic import Field, model_validator
from scipy.special import softmax
from starlette.responses import Response

from moe_lora.core.request import MAX_LOGPROB_IDS, SamplingParams
from moe_lora.serve.frontend import ABORTED
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request

from .endpoints import CompletionFormat, answer, prepared_answer, while_connected
from .fields import FieldError, check_unknown, drop_neutral
from .generation import Generation
from .protocol import CompletionRequest, Listed, TokenId

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

    from .preparing import Preparer

MAX_ITEMS = 128
MAX_LENGTH = 1 << 22
"""Length of the query in all prompts."""
_ITEMS = ("query", "items", "item_first")
_SHARED = ("model", "request_id", "priority", "timeout", "cache_salt")


class ScoreRequest(CompletionRequest):
    """A body of /v1/score as a completion of one token.

    apply_softmax: an item's scores sum to 1.  item_first: before the query.
    """

    NAMES: ClassVar = {"prompt": "query", "logprob_token_ids": "label_token_ids"}
    default_max_tokens: ClassVar[int | None] = 1

    label_token_ids: Annotated[Listed[TokenId], Field(min_length=1, max_length=MAX_LOGPROB_IDS)]
    apply_softmax: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = ("label_token_ids", "apply_softmax", *_SHARED)
        given = drop_neutral(data, (*own, *_ITEMS))
        check_unknown(given, (*own, *_ITEMS))
        for name in given:
            if name in CompletionRequest.model_fields and name not in own:
                raise bad_request(f"{name} is not a field of this request; use /v1/completions", name)
        query, items, first = (given.pop(name, None) for name in _ITEMS)
        if first not in (None, False, True):
            raise FieldError("item_first", "item_first must be true or false")
        return {**given, "prompt": _prompts(query, items, item_first=bool(first))}

    def sampling(
        self, logprobs: int | None, max_tokens: int | None, defaults: Mapping[str, int | float]
    ) -> SamplingParams:
        ids = tuple(dict.fromkeys(self.label_token_ids))
        return SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=ids)


def _prompts(query: Any, items: Any, *, item_first: bool) -> list[Any]:
    """Query and item together.  Raises FieldError."""
    items = [items] if isinstance(items, str) else items
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_ITEMS:
        raise FieldError("items", f"items must be a text, or a list of 1 to {MAX_ITEMS} texts or token ids")
    kind = str if isinstance(query, str) else list
    if not isinstance(query, kind) or not all(isinstance(one, kind) for one in items):
        raise FieldError("query", "query and items must be texts, or lists of token ids")
    if len(query) * len(items) > MAX_LENGTH:
        what = f"{len(items)} items repeat a query of length {len(query)} beyond {MAX_LENGTH} in all"
        raise FieldError("query", f"{what}; send fewer items at a time")
    return [one + query if item_first else query + one for one in items]


class ScoreFormat(CompletionFormat):
    id_prefix = "score-"

    def __init__(self, body: ScoreRequest) -> None:
        super().__init__(None, with_token_ids=False)
        self._body = body

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        whole = await while_connected(request, generation.whole())
        if not all(delta.logprobs for delta in whole):
            raise ApiError(503, ABORTED)
        tops = [dict(delta.logprobs[0].top) for delta in whole if delta.logprobs]
        values = np.array([[top[label] for label in self._body.label_token_ids] for top in tops])
        scores = softmax(values, axis=1) if self._body.apply_softmax else np.exp(values)
        num = sum(map(len, generation.prompts))
        usage = {"prompt_tokens": num, "completion_tokens": 0, "total_tokens": num}
        shown = {"object": "scoring", "model": head["model"], "scores": scores.tolist(), "usage": usage}
        return JsonResponse(shown, headers=headers)


class Endpoints:
    """Endpoint of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def score(self, request: Request) -> Response:
        async def respond(body: ScoreRequest, request: Request) -> Response:
            return await answer(self._frontend, request, ScoreFormat(body))

        return await prepared_answer(self._frontend, self._preparer.prepare, ScoreRequest, respond, request)
