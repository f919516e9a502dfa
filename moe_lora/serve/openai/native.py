# SPDX-License-Identifier: Apache-2.0
"""POST /generate, as SGLang has it: texts or token ids in, token ids with log probabilities out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fastapi import Request
from pydantic import model_validator
from starlette.responses import Response

from moe_lora.serve.http_errors import JsonResponse

from .converted import renaming
from .endpoints import (
    CLIENT_GONE,
    LEAST_LOGPROB,
    CompletionFormat,
    answer,
    prepared_answer,
    unless_disconnected,
)
from .fields import NEUTRAL, FieldError, check_unknown, drop_neutral
from .generation import Delta, Generation
from .protocol import CompletionRequest

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

    from .preparing import Preparer

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING = frozenset(
    {"n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "json_schema", "regex", "ebnf"}
)
"""Fields of sampling_params with the same name in a completion."""
_OUTER = frozenset({"priority"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    **dict.fromkeys(("return_text_in_logprobs", "log_metrics"), (None, False)),
    **dict.fromkeys(("token_ids_logprob", "image_data", "custom_params"), (None, [], {})),
}
"""Fields without an effect, and their values: of the body and of its sampling_params."""


class NativeRequest(CompletionRequest):
    """A body of /generate as a completion."""

    default_max_tokens: ClassVar[int | None] = 128

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = drop_neutral(_converted(data), cls.model_fields, _NEUTRAL)
            check_unknown(data, (*cls.model_fields, *_RENAMED))
        return data


def _converted(data: dict[str, Any]) -> dict[str, Any]:
    """The body in the form of a completion.  Raises FieldError."""
    outer, sampling = dict(data), data.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise FieldError("sampling_params", "sampling_params must be an object")
    outer.pop("sampling_params", None)
    if outer.pop("stream", None):
        raise FieldError("stream", "stream is not supported here; leave it out, or use /v1/completions")
    prompts = [outer.pop(name, None) for name in ("text", "input_ids")]
    given = [prompt for prompt in prompts if prompt is not None]
    if len(given) != 1:
        raise FieldError("input_ids", "give either text or input_ids")
    found: dict[str, Any] = {"prompt": given[0]}
    for name, own in (("rid", "request_id"), ("lora_path", "model")):
        if (value := outer.pop(name, None)) is not None:
            found[own] = value
    if outer.pop("return_logprob", None):
        found |= {"logprobs": 0, "processed_logprobs": True}
    for values, allowed in ((outer, _OUTER), (sampling, _SAMPLING)):
        for name, value in values.items():
            own = _RENAMED.get(name, name)
            if own in CompletionRequest.model_fields and name not in (*allowed, *_RENAMED, *_NEUTRAL):
                raise FieldError(name, f"{name} is not a field of this request; use /v1/completions")
            found[own] = value
    return found


class NativeFormat(CompletionFormat):
    """Answers of /generate: a list for several prompts or choices."""

    id_prefix = ""

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        whole = await unless_disconnected(request.receive, generation.whole())
        if whole is None:
            return Response(status_code=CLIENT_GONE)
        found = [self._item(delta, generation, head["id"]) for delta in whole]
        return JsonResponse(found if len(found) > 1 else found[0], headers=headers)

    def _item(self, delta: Delta, generation: Generation, request_id: str) -> dict[str, Any]:
        usage, version = generation.usage_of(delta.index), delta.adapter_version
        reason: dict[str, Any] = {"type": delta.finish_reason}
        if delta.finish_reason == "length":
            reason["length"] = len(delta.token_ids)
        about = {
            "id": request_id,
            "finish_reason": reason,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "weight_version": "default" if version is None else str(version),
        }
        if delta.logprobs is not None:
            values = [max(one.processed or 0.0, LEAST_LOGPROB) for one in delta.logprobs]
            pairs = zip(values, delta.token_ids, strict=True)
            about["output_token_logprobs"] = [(value, token_id, None) for value, token_id in pairs]
        return {"text": delta.text, "output_ids": delta.token_ids, "meta_info": about}


class Endpoints:
    """The endpoint of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def generate(self, request: Request) -> Response:
        with renaming({"prompt": "input_ids"}):
            prepare = self._preparer.prepare
            return await prepared_answer(self._frontend, prepare, NativeRequest, self._answer, request)

    async def _answer(self, body: NativeRequest, request: Request) -> Response:
        form = NativeFormat(self._frontend.tokenizer, with_token_ids=True)
        return await answer(self._frontend, request, form)
