# SPDX-License-Identifier: Apache-2.0
"""POST /generate and /abort_request, as in SGLang."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from weakref import WeakValueDictionary

import msgspec
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from starlette.responses import Response

from moe_lora.config import MAX_COUNT
from moe_lora.core.request import SamplingParams, TokenLogprobs
from moe_lora.serve.access import caller_of
from moe_lora.serve.admin.controls import read_json, scope_of
from moe_lora.serve.http_errors import JsonResponse, bad_request, describe_validation

from .endpoints import (
    LEAST_LOGPROB,
    CompletionFormat,
    EventStream,
    answer,
    prepared_answer,
    to_json,
    while_connected,
)
from .fields import NEUTRAL, FieldError, check_unknown, drop_neutral
from .generation import Delta, Generation
from .parsers.choice import closing_ids, reasoning_parsers
from .protocol import ChatMessage, ChatRequest, CompletionRequest, Listed, StreamOptions
from .token_ids import Running, abort_running, add_running

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_lora.serve.frontend import Frontend

    from .parsers.choice import AnswerParsers
    from .preparing import Preparer

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING = frozenset(
    {"n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "json_schema", "regex", "ebnf"}
)
"""sampling_params of the same name in a completion."""
_OUTER = frozenset({"on_publish", "priority", "require_reasoning", "return_routed_experts", "stream"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "log_metrics": (None, False),
    **dict.fromkeys(("image_data", "custom_params"), (None, [], {})),
}
"""Fields without an effect, and their values."""


_OF_LOGPROBS = {
    "top_logprobs_num": "logprobs",
    "logprob_start_len": "logprob_start_len",
    "token_ids_logprob": "logprob_token_ids",
    "return_text_in_logprobs": "return_text_in_logprobs",
}
"""Fields of log probabilities: SGLang's name -> own name."""
_NAMES = {
    **{"prompt": "input_ids", "prompt_logprobs": "logprob_start_len", "request_id": "rid"},
    **{"model": "lora_path", **{own: name for name, own in (_RENAMED | _OF_LOGPROBS).items()}},
}
"""Name in a completion -> name in the body."""
MAX_ABORTED = 1024


class NativeRequest(CompletionRequest):
    """A body of /generate as a completion.

    logprob_start_len: first prompt token with a log probability; -1: none.
    """

    default_max_tokens: ClassVar[int | None] = 128
    adapts_parsers: ClassVar[bool] = True

    require_reasoning: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    return_text_in_logprobs: bool | None = None
    _is_batch: bool = PrivateAttr(default=False)
    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def as_chat(self) -> ChatRequest | None:
        return ChatRequest(messages=[ChatMessage(role="user")]) if self.require_reasoning else None

    def adapted(self, parsers: AnswerParsers | None) -> AnswerParsers | None:
        """The parsers unchanged.  Raises ApiError for required reasoning without marks."""
        return reasoning_parsers(parsers, "require_reasoning") if self.require_reasoning else parsers

    @property
    def client_names(self) -> Mapping[str, str]:
        return self._names

    @classmethod
    def model_validate(cls, obj: Any, **words: Any) -> Self:
        """The body.  Raises ApiError."""
        is_text = isinstance(obj, dict) and obj.get("text") is not None
        names = {**_NAMES, "prompt": "text"} if is_text else _NAMES
        try:
            found = super().model_validate(obj)
        except ValidationError as error:
            raise describe_validation(error).renamed(names) from None
        found._names = names
        return found

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = drop_neutral(_converted(data), cls.model_fields, _NEUTRAL)
            check_unknown(data, (*cls.model_fields, *_RENAMED))
        return data

    @model_validator(mode="after")
    def _note_batch(self) -> Self:
        self._is_batch = isinstance(self.prompt, list) and not isinstance(next(iter(self.prompt), 0), int)
        return self

    @property
    def has_several(self) -> bool:
        """True: the answer is a list."""
        return self._is_batch or self.num_choices > 1

    def sampling(
        self, logprobs: int | None, max_tokens: int | None, defaults: Mapping[str, int | float]
    ) -> SamplingParams:
        found = super().sampling(logprobs, max_tokens, defaults)
        return replace(found, processed_logprobs="alone") if found.processed_logprobs else found


def _converted(data: dict[str, Any]) -> dict[str, Any]:
    """The body as a completion.  Raises FieldError."""
    outer, sampling = dict(data), data.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise FieldError("sampling_params", "sampling_params must be an object")
    outer.pop("sampling_params", None)
    prompts = [outer.pop(name, None) for name in ("text", "input_ids")]
    given = [prompt for prompt in prompts if prompt is not None]
    if len(given) != 1:
        raise FieldError("input_ids", "give either text or input_ids")
    found: dict[str, Any] = {"prompt": given[0]}
    if (rid := outer.pop("rid", None)) is not None:
        found["request_id"] = rid
    of_logprobs = {own: outer.pop(name, None) for name, own in _OF_LOGPROBS.items()}
    wanted = outer.pop("return_logprob", None)
    if wanted not in (None, False, True):
        raise FieldError("return_logprob", "return_logprob must be true or false, for all prompts")
    if wanted:
        found |= _logprobs(of_logprobs)
    else:
        for name in ("top_logprobs_num", "token_ids_logprob"):
            if of_logprobs[_OF_LOGPROBS[name]]:
                raise FieldError(name, f"{name} needs return_logprob=true")
    for values, allowed in ((outer, _OUTER), (sampling, _SAMPLING)):
        for name, value in values.items():
            own = _RENAMED.get(name, name)
            if own in NativeRequest.model_fields and name not in (*allowed, *_RENAMED, *_NEUTRAL):
                what = f"{name} is not a field of this request; use /v1/completions"
                raise bad_request(what, name)
            found[own] = value
    return found


def _logprobs(given: dict[str, Any]) -> dict[str, Any]:
    """The completion's log probability fields.  Raises FieldError."""
    ids, start = given["logprob_token_ids"], given["logprob_start_len"]
    if ids and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        what = "token_ids_logprob must be a flat list of integers, for all prompts"
        raise FieldError("token_ids_logprob", what)
    if ids and given["logprobs"]:
        what = "token_ids_logprob takes the place of top_logprobs_num; send one of them"
        raise FieldError("token_ids_logprob", what)
    found = {**given, "logprobs": given["logprobs"] or 0, "processed_logprobs": True}
    if type(start) is not int or start < 0:
        return found
    if ids:
        what = "token_ids_logprob is not served for prompt tokens; leave logprob_start_len out"
        raise FieldError("token_ids_logprob", what)
    return {**found, "prompt_logprobs": found["logprobs"]}


class NativeFormat(CompletionFormat):
    """Answers of /generate: a list for several prompts or choices."""

    id_prefix = ""
    has_bare_experts = True

    def __init__(
        self, frontend: Frontend, body: NativeRequest, parsers: AnswerParsers | None, running: Running
    ) -> None:
        super().__init__(frontend.tokenizer, with_token_ids=True)
        self.body, self._running = body, running
        self._counts: defaultdict[int, ReasoningCount] | None = None
        if body.require_reasoning and parsers is not None and frontend.tokenizer is not None:
            closing = () if parsers.is_closed else closing_ids(parsers, frontend.tokenizer)
            self._counts = defaultdict(partial(ReasoningCount, closing))

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        add_running(self._running, generation, head["id"])
        if self.body.stream:
            return NativeStream(generation, self, head, StreamOptions(), headers)
        whole = await while_connected(request, generation.whole())
        found = [self.item(delta, self.choice(), generation, head["id"]) for delta in whole]
        if self.body.prompt_logprobs is not None:
            from .native_logprobs import add_prompt_side

            await add_prompt_side(found, whole, generation, self.body, self.token_text)
        return JsonResponse(found if self.body.has_several else found[0], headers=headers)

    def choice(self) -> EncodedChoice:
        """A choice without tokens."""
        body = self.body
        if not (body.logprobs or body.logprob_token_ids or body.return_text_in_logprobs):
            return EncodedChoice()
        from .native_logprobs import ScoredChoice

        return ScoredChoice(body, self.token_text)

    def item(
        self, delta: Delta, choice: EncodedChoice, generation: Generation, request_id: str
    ) -> dict[str, Any]:
        """A choice up to the delta's end."""
        choice.add(delta)
        usage, version = generation.usage_of(delta.index), delta.adapter_version
        reason: dict[str, Any] | None = None
        if delta.finish_reason is not None:
            reason = {"type": delta.finish_reason}
        if reason is not None and delta.finish_reason == "length":
            reason["length"] = usage["completion_tokens"]
        about = {
            "id": request_id,
            "finish_reason": reason,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": generation.cached_tokens[delta.index],
            "weight_version": "default" if version is None else str(version),
        }
        if reason is not None:
            about |= {name: value_of(delta.index) for name, value_of in self.at_end.items()}
        if self._counts is not None:
            about["reasoning_tokens"] = self._counts[delta.index].add(delta.token_ids)
        if delta.logprobs is not None:
            about |= {name: msgspec.Raw(b"[%s]" % encoded) for name, encoded in choice.lists.items()}
        text, ids = msgspec.Raw(b'"%s"' % choice.text), msgspec.Raw(b"[%s]" % choice.token_ids)
        return {"text": text, "output_ids": ids, "meta_info": about}


class ReasoningCount:
    """Counts a choice's tokens to its reasoning's end.  closing: tokens of the end; (): no reasoning."""

    def __init__(self, closing: tuple[int, ...]) -> None:
        self._closing, self._ids, self._ended = closing, list[int](), not closing

    def add(self, token_ids: Sequence[int]) -> int:
        """The number including these tokens."""
        for token_id in token_ids:
            if self._ended:
                break
            self._ids.append(token_id)
            self._ended = tuple(self._ids[-len(self._closing) :]) == self._closing
        return len(self._ids)


class EncodedChoice:
    """JSON of a choice so far, without brackets: each delta is encoded once."""

    def __init__(self) -> None:
        self.text, self.token_ids = bytearray(), bytearray()
        self.lists: defaultdict[str, bytearray] = defaultdict(bytearray)

    def add(self, delta: Delta) -> None:
        self.text += to_json(delta.text)[1:-1]
        extend(self.token_ids, delta.token_ids)
        if delta.logprobs is not None:
            self.add_logprobs(delta.token_ids, delta.logprobs)

    def add_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        pairs = zip(logprobs, token_ids, strict=True)
        entries = [(max(one.logprob, LEAST_LOGPROB), token_id, None) for one, token_id in pairs]
        extend(self.lists["output_token_logprobs"], entries)


def extend(encoded: bytearray, items: Sequence[Any]) -> None:
    """Add items to a list's JSON without brackets."""
    if items:
        encoded += b"," * bool(encoded) + to_json(items)[1:-1]


class NativeStream(EventStream):
    """Events of /generate with the whole choice so far."""

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
        self._choices: defaultdict[int, EncodedChoice] = defaultdict(form.choice)

    def _events(self, delta: Delta) -> bytes:
        item = self._native.item(delta, self._choices[delta.index], self._generation, self._id)
        return b"data: %s\n\n" % to_json(
            {**item, **({"index": delta.index} if self._native.body.has_several else {})}
        )


class AbortBody(BaseModel):
    """A body of /abort_request.  rid: SGLang's clients send "" beside abort_all."""

    model_config = ConfigDict(extra="forbid")
    rid: str | Annotated[Listed[str], Field(max_length=MAX_ABORTED)] | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.rid in (None, "")) == (not self.abort_all):
            raise ValueError("give either rid or abort_all=true")
        return self


class Endpoints:
    """Endpoints of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer
        self._running: Running = WeakValueDictionary()

    async def generate(self, request: Request) -> Response:
        prepare = self._preparer.prepare
        return await prepared_answer(self._frontend, prepare, NativeRequest, self._answer, request)

    async def abort(self, request: Request) -> Response:
        """End the caller's requests by id, or all."""
        body, caller = await read_json(request, AbortBody, self._frontend), caller_of(request.scope)
        if body.abort_all:
            await self._frontend.client.call("abort_requests", scope_of(caller))
        rids = [body.rid] if isinstance(body.rid, str) else body.rid or ()
        await abort_running(self._frontend, self._running, caller, filter(None, rids))
        return Response()

    async def _answer(self, body: NativeRequest, request: Request) -> Response:
        parsers = request.state.prepared.parsers
        start, prompts = body.logprob_start_len, request.state.prepared.prompts
        if start is not None and start >= min(map(len, prompts)) and body.prompt_logprobs is not None:
            what = f"logprob_start_len={start} must be below the prompt's {min(map(len, prompts))} tokens"
            raise bad_request(what, "logprob_start_len")
        return await answer(
            self._frontend, request, NativeFormat(self._frontend, body, parsers, self._running)
        )
