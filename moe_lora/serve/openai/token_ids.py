# SPDX-License-Identifier: Apache-2.0
"""POST /inference/v1/generate and /inference/v1/abort_requests, as in vLLM."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from fastapi import Request
from pydantic import Field, PrivateAttr, ValidationError, model_validator
from starlette.responses import Response

from moe_lora.config import AUTO, MAX_COUNT
from moe_lora.core.request import MAX_LOGPROB_IDS, NO_TOKEN, SamplingParams, TokenLogprobs
from moe_lora.engine.client.messages import PauseScope
from moe_lora.serve.access import Caller, caller_of
from moe_lora.serve.http_errors import JsonResponse, bad_request, describe_validation

from .endpoints import (
    ALL_USAGE,
    LEAST_LOGPROB,
    ChatFormat,
    EventStream,
    answer,
    chat_format,
    prepared_answer,
    while_connected,
)
from .fields import NEUTRAL, FieldError, check_unknown, drop_neutral
from .generation import Delta, Generation
from .prompt_bodies import read_body
from .prompt_side import check_report, shown_scores
from .protocol import ApiRequest, ChatRequest, CompletionRequest, Listed, StreamOptions, Text, TokenId

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_lora.serve.frontend import Frontend

    from .parsers.choice import AnswerParsers
    from .preparing import Prepared, Preparer

CONTEXT = (
    *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "chat_template_kwargs"),
    *("separate_reasoning", "thinking_token_budget"),
)
"""Fields of a chat for the answer's parsers."""
_UNUSED = ("token_offsets", "reasoning_parser_kwargs", "skip_clone")
"""vLLM's fields without an effect."""
_FOREIGN = ("prompt", "echo", "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "best_of")
"""Fields of completions with a text."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    **dict.fromkeys(("features", "kv_transfer_params", "extra_args", "_all_stop_token_ids"), (None, {}, [])),
    "content_parts": (None, [], 0),
    **dict.fromkeys(("include_stop_str_in_output", "flat_logprobs"), (None, False)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True, False)),
    "output_kind": (None, 0, 1, 2),
}
"""Fields without an effect on token ids: vLLM's clients send all sampling_params."""
_OF_TEXT = dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True))
_DELTA = 1
"""vLLM's output_kind of streams."""
MAX_ABORTED = 1024
ScoredId: TypeAlias = Annotated[int, Field(ge=NO_TOKEN, le=MAX_COUNT)]
ScoredIds: TypeAlias = Listed[Annotated[Listed[ScoredId], Field(min_length=1, max_length=MAX_LOGPROB_IDS)]]


class TokensRequest(CompletionRequest):
    """A body of /inference/v1/generate, with the fields of sampling_params.

    detokenize: False: no stop strings, and no text.  reasoning_ended: at the prompt's end; None: as the
    prompt shows.
    """

    NAMES: ClassVar = {"prompt": "token_ids"}
    default_max_tokens = None
    adapts_parsers = True

    prompt: Annotated[Listed[TokenId], Field(min_length=1)]
    output_mode: Literal["tokens", "text", "derender"] = "tokens"
    detokenize: bool | None = None
    parse_context: dict[str, Any] | None = None
    reasoning_ended: bool | None = None
    prompt_logprob_token_ids: ScoredIds | None = None
    prompt_logprob_start: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    _chat: ChatRequest | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = _flattened(data)
            has_text = data.get("output_mode") not in (None, "tokens")
            if data.get("stream") and data.get("output_kind") not in (None, _DELTA):
                what = (
                    f"output_kind={data['output_kind']!r:.40} is not supported in a stream, which has deltas"
                )
                raise FieldError("output_kind", f"{what}; send {_DELTA}, or leave it out")
            data = drop_neutral(data, cls.model_fields, {**_NEUTRAL, **_OF_TEXT} if has_text else _NEUTRAL)
            check_unknown(data, cls.model_fields)
        return data

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        mode = f'output_mode="{self.output_mode}"'
        if self.detokenize is False and self.output_mode != "tokens":
            raise FieldError("output_mode", f"{mode} needs text; leave detokenize=false out")
        if self.detokenize is False and self.stop:
            raise FieldError("stop", "stop strings need text; leave detokenize=false out")
        if self.output_mode == "derender" and self.stream:
            raise FieldError("stream", f'{mode} has no stream; leave stream out, or choose "text"')
        if self.prompt_logprob_token_ids and self.stream:
            what = "prompt_logprob_token_ids is not answered in streams; leave stream out"
            raise FieldError("prompt_logprob_token_ids", what)
        if self.prompt_logprob_start and not self.prompt_logprob_token_ids:
            what = "prompt_logprob_start needs prompt_logprob_token_ids"
            raise FieldError("prompt_logprob_start", what)
        if self.parse_context is not None:
            self._chat = _chat_of(self.parse_context)
        return self

    def adapted(self, parsers: AnswerParsers | None) -> AnswerParsers | None:
        """The parsers for the reasoning's state.  Raises ApiError."""
        has_ended = self.reasoning_ended
        if parsers is not None and parsers.reasoning and has_ended is not None:
            return replace(parsers, is_closed=has_ended, is_open=parsers.is_open and not has_ended)
        if has_ended is False:
            what = "reasoning_ended=false needs parse_context, and a server with a reasoning parser"
            raise bad_request(f"{what}; leave it out, or send true or null", "reasoning_ended")
        return parsers

    def sampling(
        self, logprobs: int | None, max_tokens: int | None, defaults: Mapping[str, int | float]
    ) -> SamplingParams:
        found = super().sampling(logprobs, max_tokens, defaults)
        if not self.prompt_logprob_token_ids:
            return found
        rows = tuple(map(tuple, self.prompt_logprob_token_ids))
        return replace(
            found, prompt_logprob_token_ids=rows, prompt_logprob_start=self.prompt_logprob_start or 0
        )

    @property
    def as_chat(self) -> ChatRequest | None:
        return self._chat

    def without_prompt(self) -> Self:
        return self.model_copy(update={"prompt": [], "prompt_logprob_token_ids": None})


def _flattened(data: dict[str, Any]) -> dict[str, Any]:
    """The body as a completion.  Raises FieldError."""
    sampling = data.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise FieldError("sampling_params", "sampling_params must be an object")
    outer = {name: value for name, value in data.items() if name not in (*_UNUSED, "sampling_params")}
    for name in sampling:
        if name in outer or name == "token_ids":
            raise FieldError(name, f"sampling_params.{name} is given twice; leave one of them out")
    found = {**outer, **{name: value for name, value in sampling.items() if name not in _UNUSED}}
    for name in _FOREIGN:
        if found.pop(name, None) not in (None, False):
            raise bad_request(f"{name} is not a field of this request; send token_ids alone", name)
    if "token_ids" not in found:
        raise FieldError("token_ids", "token_ids is missing; send a list of token ids")
    return {"prompt": found.pop("token_ids"), **found}


def _chat_of(context: dict[str, Any]) -> ChatRequest:
    """The parsers' chat.  Raises ApiError and FieldError."""
    wrong = next((name for name in context if name not in (*CONTEXT, "history_tool_call_cnt")), None)
    if wrong is not None:
        what = f"parse_context.{wrong[:64]} is unknown; allowed are {', '.join(CONTEXT)}"
        raise FieldError("parse_context", what)
    given = {name: value for name, value in context.items() if name in CONTEXT}
    try:
        return ChatRequest.model_validate(
            {**given, "messages": [{"role": "user", "content": ""}], "return_token_ids": True}
        )
    except ValidationError as error:
        raise describe_validation(error) from error


class AbortRequest(ApiRequest):
    """POST /inference/v1/abort_requests."""

    model: Text | None = None
    request_ids: Annotated[Listed[Text], Field(max_length=MAX_ABORTED)]


RunningId: TypeAlias = tuple[str | None, str]
Running: TypeAlias = "WeakValueDictionary[RunningId, Generation]"
"""Generations of one front end."""


def add_running(running: Running, generation: Generation, request_id: str) -> None:
    """Let any front end abort the generation: ids of choices begin with `_mark`."""
    found = running_id(generation.caller, request_id)
    generation.engine_id = _mark(found) + generation.engine_id
    running[found] = generation


def running_id(caller: Caller, request_id: str) -> RunningId:
    return None if caller.key is None else caller.key.id, request_id


def _mark(found: RunningId) -> str:
    return blake2b(repr(found).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() + "-"


async def abort_running(
    frontend: Frontend, running: Running, caller: Caller, request_ids: Iterable[str]
) -> None:
    """End the caller's generations of these ids, elsewhere through the instances."""
    found = [running_id(caller, request_id) for request_id in request_ids]
    for one in found:
        if (generation := running.get(one)) is not None:
            await generation.abort()
    if found:
        await frontend.client.call("abort_requests", PauseScope(ids=tuple(map(_mark, found))))


class TokensFormat(ChatFormat):
    """Choices of token ids, by output_mode with text or message."""

    id_prefix = "generate-tokens-"

    def __init__(self, body: TokensRequest, prepared: Prepared, frontend: Frontend, running: Running) -> None:
        self._mode, self._body, self._running = body.output_mode, body, running
        super().__init__(frontend.tokenizer, with_token_ids=True)
        self._message: ChatFormat | None = None
        if self._mode == "derender":
            plain = ChatFormat(frontend.tokenizer, with_token_ids=True)
            chat = body.as_chat
            self._message = plain if chat is None else chat_format(chat, frontend, prepared.parsers)
            self.text = self._message.text
        elif self._mode == "tokens" and not prepared.sampling.stop:
            self.text = None

    def show_at_end(self, name: str, value_of: Callable[[int], object]) -> None:
        super().show_at_end(name, value_of)
        if self._message is not None:
            self._message.show_at_end(name, value_of)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        entry = self.whole(delta)
        if self.prompt_of is not None and delta.index not in self._shown:
            self._shown.add(delta.index)
            entry["prompt_token_ids"] = self.prompt_of(delta.index)
        return entry

    def whole(self, delta: Delta) -> dict[str, Any]:
        if self._message is not None:
            return self._message.whole(delta)
        entry = self.entry(delta, "text", delta.text)
        if self._mode == "tokens":
            del entry["text"]
        return entry

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        if self._mode != "tokens":
            return super().logprobs(index, token_ids, logprobs)

        def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
            return {"token_id": token_id, "logprob": max(logprob, LEAST_LOGPROB), "rank": rank}

        content = []
        for token_id, one in zip(token_ids, logprobs, strict=True):
            drawn = entry(token_id, one.logprob, one.position)
            others = [entry(*other, rank) for rank, other in enumerate(one.top, 1) if other[0] != token_id]
            content.append({**drawn, "top_logprobs": [drawn, *others]})
        return {"content": content}

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        head = {"request_id": head["id"], "output_mode": self._mode, "model": head["model"]}
        add_running(self._running, generation, head["request_id"])
        if self._body.stream:
            is_forced = generation.frontend.config.force_include_usage
            options = ALL_USAGE if is_forced else self._body.stream_options or StreamOptions()
            return EventStream(generation, self, head, options, headers)
        whole = await while_connected(request, generation.whole())
        shown = {**head, "choices": [self.whole(delta) for delta in whole], "usage": generation.usage()}
        shown |= {"prompt_logprobs": None, "kv_transfer_params": None}
        scores = await shown_scores(self, generation.prompt_of(0), whole[0], self._body.prompt_logprobs)
        if scores is not None:
            shown["prompt_logprobs"] = scores
        rows = len(generation.sampling.prompt_logprob_token_ids)
        if rows:
            shown["prompt_token_id_logprobs"] = _as_npy(whole[0], rows)
        if self.prompt_of is not None:
            shown["prompt_token_ids"] = self.prompt_of(0)
        return JsonResponse(shown, headers=headers)


def _as_npy(delta: Delta, num_rows: int) -> str:
    """Base64 numpy file of log probabilities of prompt_logprob_token_ids.

    Raises ApiError as `check_report`.
    """
    check_report(delta)
    found = b"" if delta.prompt is None else delta.prompt.id_logprobs or b""
    file = BytesIO()
    np.save(file, np.frombuffer(found, dtype="<f4").reshape(num_rows, -1))
    return b64encode(file.getvalue()).decode()


class Endpoints:
    """Endpoints of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer
        self._running: Running = WeakValueDictionary()

    async def generate(self, request: Request) -> Response:
        prepare = self._preparer.prepare
        return await prepared_answer(self._frontend, prepare, TokensRequest, self._answer, request)

    async def _answer(self, body: TokensRequest, request: Request) -> Response:
        """Raises ApiError."""
        config, prepared, mode = self._frontend.limits.config, request.state.prepared, body.output_mode
        if mode != "tokens" and self._frontend.tokenizer is None:
            what = f'output_mode="{mode}" requires a tokenizer, and this server has none'
            raise bad_request(f"{what}; leave output_mode out", "output_mode")
        has_parser = config.reasoning_parser != "none" or config.tool_call_parser not in (AUTO, "none")
        if mode == "derender" and body.as_chat is None and has_parser:
            what = 'output_mode="derender" needs parse_context on a server with parsers'
            raise bad_request(f"{what}; send the parse_context of the rendered chat", "parse_context")
        form = TokensFormat(body, prepared, self._frontend, self._running)
        return await answer(self._frontend, request, form)

    async def abort(self, request: Request) -> Response:
        """End the key's requests; unknown ids may have ended."""
        found = await read_body(request, AbortRequest, self._frontend, self._preparer)
        caller = caller_of(request.scope)
        await abort_running(self._frontend, self._running, caller, found.body.request_ids)
        return Response()
