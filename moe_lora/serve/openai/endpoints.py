# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, cast

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_lora.core.request import ModelInfo, TokenLogprobs
from moe_lora.engine.text.text import REPLACEMENT
from moe_lora.serve.access import Caller
from moe_lora.serve.connections import HEADERS_S
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request, to_api_error, to_json
from moe_lora.serve.limits import JSON_MEDIA, Handler, body_of, client_of

from .generation import Delta, Generation
from .preparing import Prepared, Preparer
from .protocol import (
    MAX_ID_CHARS,
    MAX_TIMEOUT_S,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    StreamOptions,
)

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer

    from .parsers.choice import AnswerParsers

T = TypeVar("T")
Prepare: TypeAlias = "Callable[[type[SamplingFields], bytearray, ModelInfo, Scope], Awaitable[Prepared]]"
Respond: TypeAlias = "Callable[[Request, Generation, dict[str, Any], dict[str, str]], Awaitable[Response]]"
_COMPRESSED = re.compile(r"\b(gzip|deflate|compress|br|zstd)\b", re.IGNORECASE)
CLIENT_GONE = 499
"""Proxies' status for a client's early close."""
LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, absent in JSON."""
LOAD_FORMAT = "endpoint-load-metrics-format"
"""Header of requests for a load report."""
ALL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)
"""Options of all streams with force_include_usage."""


class ChoiceFormat:
    """An endpoint's format of choices, for one request.

    continues_prompt: the text continues the prompt's.  prompt_of: a choice's prompt tokens; None: not in the
    answer.  respond: makes another interface's answer.  collect: replaces `Generation.whole`.
    """

    prompt_of: Callable[[int], tuple[int, ...]] | None = None
    respond: Respond | None = None
    collect: Callable[[Generation], Coroutine[Any, Any, list[Delta]]] | None = None
    reasoning_tokens: Counter[int] | None = None
    watch: Callable[[Delta], object] | None = None
    at_end: Mapping[str, Callable[[int], object]] = {}
    """Further fields of a choice's end, by index."""
    in_choice: Mapping[str, Any] = {}
    beside_choices: Mapping[str, Any] = {}
    """Fields of a whole answer."""

    object_name: str
    chunk_object_name: str
    id_prefix: str
    continues_prompt = False
    has_bare_experts = False
    """True: experts are numbers without a file's head."""
    shows_ids = False
    """True: log probabilities have tokens as "token_id:7"."""

    def __init__(self, tokenizer: Tokenizer | None, *, with_token_ids: bool) -> None:
        self.text: Any = tokenizer
        """Decodes the answer; None without a tokenizer."""
        self._tokenizer = tokenizer
        self._with_token_ids = with_token_ids
        self._offsets: dict[int, int] = {}
        self._shown: set[int] = set()
        """Choices after their first event."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The entry before a choice's first delta, or None."""
        return None

    def beside(self, index: int) -> dict[str, Any]:
        """Fields beside the choices, at a choice's first event and in a whole answer."""
        return {}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A delta's choices entry in a stream."""
        raise NotImplementedError

    def whole(self, delta: Delta) -> dict[str, Any]:
        """The choices entry of a finished choice."""
        raise NotImplementedError

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        """Log probabilities of further tokens of the choice."""
        raise NotImplementedError

    def entry(self, delta: Delta, key: str, content: Any) -> dict[str, Any]:
        """A choices entry; the last has `stop_reason` (vLLM) and `matched_stop` (SGLang)."""
        logprobs = delta.logprobs
        choice = {
            "index": delta.index,
            key: content,
            "logprobs": None if logprobs is None else self.logprobs(delta.index, delta.token_ids, logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"], choice["matched_stop"] = delta.stop_reason, delta.matched_stop
            for name, value_of in self.at_end.items():
                choice[name] = value_of(delta.index)
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        if logprobs and logprobs[0].processed is not None:
            choice["processed_logprobs"] = [
                _finite(one.processed) for one in logprobs if one.processed is not None
            ]
        if delta.adapter_version is not None:
            choice["adapter_version"] = delta.adapter_version
        return choice

    def show_at_end(self, name: str, value_of: Callable[[int], object]) -> None:
        """Show a field at each choice's end, by index."""
        self.at_end = {**self.at_end, name: value_of}

    def token_text(self, token_id: int, *, is_first: bool = False) -> str:
        """The token's text; "token_id:7" without a tokenizer.  is_first: of a text, without its space."""
        if self._tokenizer is None or self.shows_ids:
            return f"token_id:{token_id}"
        if is_first:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._tokenizer.token_text(token_id)


class CompletionFormat(ChoiceFormat):
    """Choices of /v1/completions; text_offset counts within the answer."""

    object_name = chunk_object_name = "text_completion"
    id_prefix = "cmpl-"
    continues_prompt = True
    in_choice = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}  # noqa: RUF012

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self.whole(delta)

    def whole(self, delta: Delta) -> dict[str, Any]:
        entry, index = self.entry(delta, "text", delta.text), delta.index
        if self.prompt_of is not None and index not in self._shown:
            self._shown.add(index)
            entry["prompt_token_ids"] = self.prompt_of(index)
        return entry

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        entry: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        offset = self._offsets.get(index, 0)
        for token_id, chosen in zip(token_ids, logprobs, strict=True):
            text = self.token_text(token_id)
            likeliest: dict[str, float] = {}
            for other, logprob in ((token_id, chosen.logprob), *chosen.top):
                shown = self._named(other, self.token_text(other))
                likeliest[shown] = max(_finite(logprob), likeliest.get(shown, LEAST_LOGPROB))
            entry["tokens"].append(self._named(token_id, text))
            entry["token_logprobs"].append(_finite(chosen.logprob))
            entry["top_logprobs"].append(likeliest)
            entry["text_offset"].append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return entry

    def _named(self, token_id: int, text: str) -> str:
        """The text, or OpenAI's name of a part of a character: parts have one text."""
        if REPLACEMENT not in text or self._tokenizer is None:
            return text
        return f"bytes:{repr(self._tokenizer.part_bytes(token_id))[2:-1]}"


class ChatFormat(ChoiceFormat):
    """Choices of /v1/chat/completions; a stream starts with the role."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    in_choice = {"token_ids": None}  # noqa: RUF012
    beside_choices = {"prompt_logprobs": None, "prompt_token_ids": None}  # noqa: RUF012

    def opening(self, index: int) -> dict[str, Any] | None:
        if index in self._shown:
            return None
        self._shown.add(index)
        role = {"role": "assistant", "content": ""}
        return {"index": index, "delta": role, "logprobs": None, "finish_reason": None}

    def beside(self, index: int) -> dict[str, Any]:
        return {} if self.prompt_of is None else {"prompt_token_ids": self.prompt_of(index)}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self.entry(delta, "delta", {"content": delta.text})

    def whole(self, delta: Delta) -> dict[str, Any]:
        return self.entry(delta, "message", {"role": "assistant", "content": delta.text, "refusal": None})

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        def entry(token_id: int, logprob: float, place: int) -> dict[str, Any]:
            text = self.token_text(token_id, is_first=not place)
            spelled = text.encode()
            if REPLACEMENT in text and self._tokenizer is not None:
                spelled = self._tokenizer.part_bytes(token_id)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(spelled)}

        start = self._offsets.get(index, 0)
        self._offsets[index] = start + len(token_ids)
        return {
            "content": [
                {
                    **entry(token_id, chosen.logprob, place),
                    "top_logprobs": [entry(other, logprob, place) for other, logprob in chosen.top],
                }
                for place, (token_id, chosen) in enumerate(zip(token_ids, logprobs, strict=True), start)
            ]
        }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class EventStream(Response):
    """Server-sent events of a generation; a disconnect closes the generation.

    An error before the first event is an HTTP error, a later error an event.
    """

    media_type = "text/event-stream"
    END: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(
        self,
        generation: Generation,
        form: ChoiceFormat,
        head: dict[str, Any],
        options: StreamOptions,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._form = form
        opening = json.dumps({**head, "object": form.chunk_object_name})
        self._opening = f'data: {opening[:-1]}, "choices": ['.encode()
        self._usage_in_all = bool(options.continuous_usage_stats) and options.include_usage is not False
        self._usage_at_end = self._usage_in_all or bool(options.include_usage)
        self._closing = b'], "usage": null}\n\n' if self._usage_at_end else b"]}\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send_events(send, scope["state"]["send_body"]))

    async def _send_events(self, send: Send, send_body: Send) -> None:
        """send: for the start, seen by error handlers.  send_body: bypasses them."""
        last, started = self.END, False
        try:
            async with self._generation.deltas() as deltas:
                async for delta in deltas:
                    if not started:
                        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        await send(start)
                        started = True
                    body = self._events(delta)
                    await send_body({"type": "http.response.body", "body": body, "more_body": True})
            if self._usage_at_end:
                ended = {"usage": self._generation.usage()}
                if self._generation.beside_usage is not None:
                    ended |= self._generation.beside_usage()
                last = b"%s], %s\n\n%s" % (self._opening, to_json(ended)[1:], last)
        except Exception as error:
            if not started:
                raise
            last = self._failed(to_api_error(error))
        await send_body({"type": "http.response.body", "body": last, "more_body": False})

    def _failed(self, error: ApiError) -> bytes:
        return b"data: %s\n\n%s" % (to_json(error.body), self.END)

    def _events(self, delta: Delta) -> bytes:
        index, form = delta.index, self._form
        event = self._event(form.chunk(delta), index)
        opening = form.opening(index)
        if opening is None:
            return event
        return self._event(opening, index, begun=False, beside=form.beside(index)) + event

    def _event(
        self, choice: dict[str, Any], index: int, *, begun: bool = True, beside: dict[str, Any] | None = None
    ) -> bytes:
        closing = self._closing
        if beside or self._usage_in_all:
            fields = {**(beside or {}), **self._usage(index, begun=begun)}
            closing = b"], %s\n\n" % to_json(fields)[1:]
        return b"%s%s%s" % (self._opening, to_json(choice), closing)

    def _usage(self, index: int, *, begun: bool) -> dict[str, Any]:
        if self._usage_in_all:
            return {"usage": self._generation.usage_of(index, begun=begun)}
        return {"usage": None} if self._usage_at_end else {}


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if cancelled, as at a disconnect."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() and not task.cancelled() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class ClientGone(Exception):
    """The client has disconnected."""


async def unless_gone(answered: Awaitable[Response]) -> Response:
    """The answer, or one of status CLIENT_GONE after a disconnect."""
    try:
        return await answered
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.  Raises ClientGone after a disconnect."""
    found = await unless_disconnected(request.receive, work)
    if found is None:
        raise ClientGone
    return found


def prepared_route(frontend: Frontend, preparer: Preparer) -> type[APIRoute]:
    """Routes with a prepared body: `request.state.prepared`."""

    class PreparedRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            assert self.body_field is not None
            kind = cast("type[SamplingFields]", self.body_field.field_info.annotation)
            return partial(prepared_answer, frontend, preparer.prepare, kind, self.endpoint)

    return PreparedRoute


async def prepared_answer(
    frontend: Frontend,
    prepare: Prepare,
    kind: type[SamplingFields],
    endpoint: Callable[[Any, Request], Awaitable[Response]],
    request: Request,
) -> Response:
    """The endpoint's answer to a body.  Raises ApiError for a wrong body."""
    limits, info = frontend.limits, await frontend.client.model_info()
    async with body_of(request, limits, limits.config.max_body_bytes) as content:
        prepared = await prepare(kind, content, info, request.scope)
    request.state.prepared = prepared
    if prepared.granted:
        request.state.caller = request.state.caller.with_right(*prepared.granted)
    try:
        return await endpoint(prepared.body, request)
    except ApiError as error:
        raise prepared.body.renamed(error) from error.__cause__


async def answer(frontend: Frontend, request: Request, form: ChoiceFormat) -> Response:
    """Generate; a disconnect aborts the engine's work."""
    prepared: Prepared = request.state.prepared
    body = prepared.body
    model = frontend.model_name if body.model is None else body.model
    adapter = None if model in frontend.model_names else model
    if adapter is not None and ":" in adapter:
        adapter = frontend.adapter_of(adapter)
    caller, source = request.state.caller, None
    if body.lora is not None:
        from moe_lora.serve.composing import composed

        adapter, caller, source = await composed(frontend, model, body.lora, caller)
    is_rare = body.max_tokens == 0 or body.use_beam_search or frontend.config.per_request_metrics
    is_rare = is_rare or prepared.sampling.routed_experts or prepared.sampling.on_publish == "switch"
    generation = (_rare_generation(prepared, form, frontend) if is_rare else Generation)(
        frontend=frontend,
        client=client_of(request.scope),
        caller=caller,
        adapter=adapter,
        prompts=prepared.prompts,
        answer_tokens=prepared.answer_tokens,
        num_choices=body.num_choices,
        sampling=prepared.sampling,
        tokenizer=form.text,
        continues_prompt=form.continues_prompt,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        timeout_s=body.timeout if TIMEOUT not in request.headers else timeout_of(request.headers[TIMEOUT]),
        from_s=request.scope.get(HEADERS_S) or time.monotonic(),
        reasoning_tokens=form.reasoning_tokens,
        watch=form.watch,
        source=source,
        grammar_field=prepared.grammar_field,
        stop_token_ids=body.stop_token_ids or (),
        renamed=body.renamed,
    )
    request_id = f"{form.id_prefix}{name_request(request, body.request_id)}"
    head = {"id": request_id, "created": int(time.time()), "model": adapter or frontend.model_name}
    form.prompt_of = generation.prompt_of if body.return_token_ids else None
    headers = frontend.ignored_fields.note(prepared.ignored) if prepared.ignored else {}
    if LOAD_FORMAT in request.headers:
        from .load_report import load_header

        headers = {**headers, **await load_header(request, frontend)}
    if form.respond is not None:
        return await unless_gone(form.respond(request, generation, head, headers))
    if body.stream:
        options = ALL_USAGE if frontend.config.force_include_usage else body.stream_options or StreamOptions()
        return EventStream(generation, form, head, options, headers)
    work = generation.whole() if form.collect is None else form.collect(generation)
    whole = await unless_disconnected(request.receive, work)
    if whole is None:
        return Response(status_code=CLIENT_GONE)
    choices = [{**form.in_choice, **form.whole(delta)} for delta in whole]
    answered = {**head, "object": form.object_name, "choices": choices, "usage": generation.usage()}
    if generation.beside_usage is not None:
        answered |= generation.beside_usage()
    answered |= {**form.beside_choices, **(form.beside(0) if body.return_token_ids else {})}
    return JsonResponse(answered, headers=headers)


def generating_router(frontend: Frontend, preparer: Preparer) -> APIRouter:
    router = APIRouter(tags=["generate"], route_class=prepared_route(frontend, preparer))

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue each prompt."""
        with_token_ids = bool(body.return_token_ids) or frontend.tokenizer is None
        form = CompletionFormat(frontend.tokenizer, with_token_ids=with_token_ids)
        if body.echo or body.prompt_logprobs is not None:
            from .prompt_side import PromptCompletion

            prepared: Prepared = request.state.prepared
            form = PromptCompletion(frontend.tokenizer, prepared, with_token_ids=with_token_ids)
        if body.logprobs is not None or body.prompt_logprobs is not None:
            form.shows_ids = shows_ids(body, frontend)
        return await answer(frontend, request, form)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await answer_chat(frontend, body, request)

    return router


async def answer_chat(frontend: Frontend, body: ChatRequest, request: Request) -> Response:
    prepared: Prepared = request.state.prepared
    form = chat_format(body, frontend, prepared.parsers)
    if body.echo or body.prompt_logprobs is not None:
        from .prompt_side import PromptChat

        form = PromptChat(form, prepared)
    return await answer(frontend, request, form)


def _rare_generation(prepared: Prepared, form: ChoiceFormat, frontend: Frontend) -> Callable[..., Generation]:
    """Makes a generation for rarely used fields."""
    body, make = prepared.body, Generation
    if body.use_beam_search:
        from .beams import BeamGeneration

        length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return partial(BeamGeneration, length_penalty=length_penalty)
    if body.max_tokens == 0 and isinstance(body, CompletionRequest):
        from .prompt_side import PromptOnly as make
    elif frontend.config.per_request_metrics:
        from .request_metrics import MeasuredGeneration as make
    found: Callable[..., Generation] = make
    if prepared.sampling.on_publish == "switch":
        from .adapter_versions import with_versions

        found = partial(with_versions, make, form)
    if not prepared.sampling.routed_experts:
        return found
    from .routed_experts import with_experts

    return partial(with_experts, found, form)


def chat_format(body: ChatRequest, frontend: Frontend, parsers: AnswerParsers | None) -> ChatFormat:
    with_token_ids, tokenizer = bool(body.return_token_ids), frontend.tokenizer
    if parsers is None or tokenizer is None:
        form = ChatFormat(tokenizer, with_token_ids=with_token_ids)
    else:
        from .parsers.answers import ParsedChat

        form = ParsedChat(tokenizer, parsers, with_token_ids=with_token_ids)
    if body.logprobs or body.prompt_logprobs is not None:
        form.shows_ids = shows_ids(body, frontend)
    if body.separate_reasoning is not None or body.stream_reasoning is False:
        from .parsers.separate import SeparateChat

        form = SeparateChat(form, streams=body.stream_reasoning is not False)
    return form


def shows_ids(body: SamplingFields, frontend: Frontend) -> bool:
    given = body.return_tokens_as_token_ids
    return frontend.config.return_tokens_as_token_ids if given is None else given


TIMEOUT = "X-Request-Timeout"


def timeout_of(text: str) -> float:
    """Seconds in a header.  Raises ApiError."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= MAX_TIMEOUT_S:
        raise bad_request(f"{TIMEOUT}: {text[:50]!r} must be seconds above 0 and at most {MAX_TIMEOUT_S:g}")
    return found


HEADER = "X-Request-Id"


class RequestIds:
    """Answers every HTTP request with its `X-Request-Id`, or a new id.

    A header of more than MAX_ID_CHARS characters counts as absent.
    """

    def __init__(self, app: ASGIApp, caller: Caller, origins: Sequence[str]) -> None:
        self._app, self._caller, self._origins = app, caller, {*origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        headers = Request(scope).headers
        given = headers.get(HEADER, "")
        if len(given) > MAX_ID_CHARS:
            given = ""
        state |= {"request_id_given": bool(given), "request_id": given or uuid.uuid4().hex}
        state["caller"] = self._caller
        state["send_body"] = send  # outer wrappers only look at a response's start

        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            return send(message)

        app = partial(allow_origin, self._app, self._origins) if "origin" in headers else self._app
        if _COMPRESSED.search(headers.get("content-encoding", "")):
            what = f"Content-Encoding: {headers['content-encoding']} is not read; send the body uncompressed"
            app = JsonResponse(ApiError(415, what).body_for(scope["path"]), 415)
        await app(scope, receive, named)


async def allow_origin(app: ASGIApp, allowed: set[str], scope: Scope, receive: Receive, send: Send) -> None:
    """`app`'s answer, or 403 to another site's page: browsers send a POST without JSON unasked."""
    request = Request(scope)
    origin, media = request.headers["origin"], request.headers.get("content-type", "")
    reads = request.method in ("GET", "HEAD", "OPTIONS") and request.url.path != "/flush_cache"
    own = origin.partition("://")[2] == request.headers.get("host")
    if not (reads or own or JSON_MEDIA.fullmatch(media) or {"*", origin} & allowed):
        what = f"pages of {origin[:128]} may not send this request; name the origin in front_end.cors_origins"
        app = JsonResponse(ApiError(403, what).body_for(scope["path"]), 403)
    await app(scope, receive, send)


def name_request(request: Request, request_id: str | None) -> str:
    """The request's id: the header's, else `request_id`, else new (as in vLLM).

    request_id: if unfit for a header, in the answer's body only.
    """
    state = request.state
    if request_id is None or state.request_id_given:
        given: str = state.request_id
        return given
    if request_id.isascii() and request_id.isprintable() and request_id == request_id.strip():
        state.request_id = request_id
    return request_id
