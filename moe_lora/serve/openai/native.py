# SPDX-License-Identifier: Apache-2.0
"""POST /generate and /abort_request, as SGLang has them: texts or token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from weakref import WeakValueDictionary

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from moe_lora.serve.access import caller_of
from moe_lora.serve.admin.controls import read_json, scope_of
from moe_lora.serve.http_errors import JsonResponse

from .converted import renaming
from .endpoints import (
    CLIENT_GONE,
    LEAST_LOGPROB,
    CompletionFormat,
    EventStream,
    answer,
    prepared_answer,
    to_json,
    unless_disconnected,
)
from .fields import NEUTRAL, FieldError, check_unknown, drop_neutral
from .generation import Delta, Generation
from .protocol import CompletionRequest, StreamOptions
from .token_ids import Running, running_id

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_lora.serve.frontend import Frontend

    from .preparing import Preparer

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING = frozenset(
    {"n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "json_schema", "regex", "ebnf"}
)
"""Fields of sampling_params with the same name in a completion."""
_OUTER = frozenset({"priority", "stream"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    **dict.fromkeys(("return_text_in_logprobs", "log_metrics"), (None, False)),
    **dict.fromkeys(("token_ids_logprob", "image_data", "custom_params"), (None, [], {})),
}
"""Fields without an effect, and their values: of the body and of its sampling_params."""


MAX_ABORTED = 1024


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
    """Answers of /generate: a list for several prompts or choices.

    running: gets the generation by its key and the answer's id.
    """

    id_prefix = ""

    def __init__(self, frontend: Frontend, body: NativeRequest, running: Running) -> None:
        super().__init__(frontend.tokenizer, with_token_ids=True)
        self._streams, self._running = bool(body.stream), running

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        self._running[running_id(generation.caller, head["id"])] = generation
        if self._streams:
            return NativeStream(generation, self, head, StreamOptions(), headers)
        whole = await unless_disconnected(request.receive, generation.whole())
        if whole is None:
            return Response(status_code=CLIENT_GONE)
        found = [self.item(delta, generation, head["id"]) for delta in whole]
        return JsonResponse(found if len(found) > 1 else found[0], headers=headers)

    def item(self, delta: Delta, generation: Generation, request_id: str) -> dict[str, Any]:
        """A choice up to the delta's end; delta: of all steps so far."""
        usage, version = generation.usage_of(delta.index), delta.adapter_version
        reason: dict[str, Any] | None = None
        if delta.finish_reason is not None:
            reason = {"type": delta.finish_reason}
        if reason is not None and delta.finish_reason == "length":
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


class NativeStream(EventStream):
    """Events of /generate: each has the whole choice so far, and `index` with several choices."""

    def __init__(
        self,
        generation: Generation,
        form: NativeFormat,
        head: dict[str, Any],
        options: StreamOptions,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(generation, form, head, options, headers)
        self._native, self._id = form, head["id"]
        self._so_far: dict[int, Delta] = {}
        self._has_several = len(generation.prompts) * generation.num_choices > 1

    def _events(self, delta: Delta) -> bytes:
        before = self._so_far.get(delta.index)
        if before is not None:
            delta.text = before.text + delta.text
            delta.token_ids = before.token_ids + delta.token_ids
            if delta.logprobs is not None:
                delta.logprobs = (before.logprobs or ()) + delta.logprobs
        self._so_far[delta.index] = delta
        item = self._native.item(delta, self._generation, self._id)
        return b"data: %s\n\n" % to_json({**item, **({"index": delta.index} if self._has_several else {})})


class AbortBody(BaseModel):
    """A body of /abort_request."""

    model_config = ConfigDict(extra="forbid")
    rid: str | Annotated[list[str], Field(max_length=MAX_ABORTED)] | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.rid is None) == (not self.abort_all):
            raise ValueError("give either rid or abort_all=true")
        return self


class Endpoints:
    """The endpoints of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer
        self._running: Running = WeakValueDictionary()

    async def generate(self, request: Request) -> Response:
        with renaming({"prompt": "input_ids"}):
            prepare = self._preparer.prepare
            return await prepared_answer(self._frontend, prepare, NativeRequest, self._answer, request)

    async def abort(self, request: Request) -> Response:
        """End the caller's requests by their ids at this front end, or all of its scope anywhere.

        Unknown ids may have ended before.
        """
        body, caller = await read_json(request, AbortBody, self._frontend), caller_of(request.scope)
        if body.abort_all:
            await self._frontend.client.call("abort_requests", scope_of(caller))
        for rid in [body.rid] if isinstance(body.rid, str) else body.rid or ():
            generation = self._running.get(running_id(caller, rid))
            if generation is not None:
                await generation.abort()
        return Response()

    async def _answer(self, body: NativeRequest, request: Request) -> Response:
        return await answer(self._frontend, request, NativeFormat(self._frontend, body, self._running))
