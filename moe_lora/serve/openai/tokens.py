# SPDX-License-Identifier: Apache-2.0
"""Tokens in, tokens out, in vLLM's form: POST /inference/v1/generate, and its bodies by the render paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import model_validator
from starlette.responses import Response

from moe_lora.core.request import TokenLogprobs
from moe_lora.serve.access import caller_of
from moe_lora.serve.http_errors import JsonResponse, bad_request

from .converted import renaming
from .endpoints import (
    CLIENT_GONE,
    ChatFormat,
    EventStream,
    answer,
    name_request,
    prepared_answer,
    unless_disconnected,
)
from .fields import NEUTRAL, FieldError, check_unknown, drop_neutral
from .generation import Delta, Generation
from .prompt_bodies import check_model
from .prompt_side import in_slices, score_parts
from .protocol import ChatRequest, CompletionRequest, SamplingFields, StreamOptions

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

    from .preparing import Prepared, Preparer

OUTER = frozenset({"request_id", "model", "stream", "stream_options", "cache_salt", "priority", "timeout"})
NOT_SAMPLING = OUTER | {
    *("prompt", "echo", "add_special_tokens", "best_of", "return_token_ids", "return_tokens_as_token_ids"),
    *("truncate_prompt_tokens", "truncation_side"),
}
SAMPLING = frozenset(CompletionRequest.model_fields) - NOT_SAMPLING
NAMES = {"prompt": "token_ids"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    **dict.fromkeys(("features", "kv_transfer_params", "extra_args", "_all_stop_token_ids"), (None, {}, [])),
    **dict.fromkeys(("include_stop_str_in_output", "flat_logprobs"), (None, False)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True, False)),
    "output_kind": (None, 0, 1, 2),
}
"""Fields without an effect on token ids, and their values."""


class TokensRequest(CompletionRequest):
    """POST /inference/v1/generate: a prompt of token ids; other settings in `sampling_params`."""

    default_max_tokens = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = {"token_ids", "sampling_params", *OUTER}
        outer = drop_neutral(data, own, _NEUTRAL)
        check_unknown(outer, own)
        if misplaced := sorted(SAMPLING & outer.keys()):
            raise FieldError(misplaced[0], f"{misplaced[0]} belongs in sampling_params")
        given = outer.pop("sampling_params", None)
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise FieldError("sampling_params", "sampling_params must be an object")
        with_text = given.get("detokenize") is not False
        inner = drop_neutral(
            {name: one for name, one in given.items() if name != "detokenize"}, SAMPLING, _NEUTRAL
        )
        check_unknown(inner, SAMPLING)
        if inner.get("stop") and not with_text:
            raise FieldError("stop", "stop needs text; leave detokenize out, or send stop_token_ids")
        token_ids = outer.pop("token_ids", None)
        if not isinstance(token_ids, list) or not token_ids or type(token_ids[0]) is not int:
            raise FieldError("token_ids", "token_ids must be a list of at least one token id")
        return {**inner, **outer, "prompt": token_ids}


class TokensFormat(ChatFormat):
    """Choices of token ids.  Log probabilities as in chats; tokens are "token_id:7"."""

    id_prefix = ""
    chunk_object_name = "generate.chunk"

    def __init__(self, frontend: Frontend, prepared: Prepared) -> None:
        super().__init__(None, with_token_ids=True)
        self.text = frontend.tokenizer if prepared.sampling.stop else None
        self._prepared = prepared

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        """The answer with `request_id`."""
        body, head = self._prepared.body, {"request_id": head["id"]}
        if body.stream:
            return EventStream(generation, self, head, body.stream_options or StreamOptions(), headers)
        found = await unless_disconnected(request.receive, self._whole(generation))
        if found is None:
            return Response(status_code=CLIENT_GONE)
        return JsonResponse({**head, **found, "kv_transfer_params": None}, headers=headers)

    async def _whole(self, generation: Generation) -> dict[str, Any]:
        whole = await generation.whole()
        asked, report, scores = self._prepared.body.prompt_logprobs, whole[0].prompt, None
        if asked is not None and report is not None and report.logprobs is not None:
            scores = await in_slices(score_parts(self, generation.prompt_of(0), report.logprobs, asked))
        choices = [self.chunk(delta) for delta in whole]
        return {"choices": choices, "prompt_logprobs": scores, "usage": generation.usage()}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        entry = self.entry(delta, "text", "")
        del entry["text"]
        return entry

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        """As in chats; without likeliest tokens the token itself is listed, as in vLLM."""
        found = super().logprobs(index, token_ids, logprobs)
        for entry in found["content"]:
            if not entry["top_logprobs"]:
                entry["top_logprobs"] = [{name: entry[name] for name in ("token", "logprob", "bytes")}]
        return found


class Endpoints:
    """Methods answer one path each."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def generate(self, request: Request) -> Response:
        with renaming(NAMES):
            return await self._prepared(TokensRequest, self._generated, request)

    async def render_completion(self, request: Request) -> Response:
        """One body for each prompt."""
        return await self._prepared(CompletionRequest, self._rendered_completion, request)

    async def render_chat(self, request: Request) -> Response:
        """The body of a conversation."""
        return await self._prepared(ChatRequest, self._rendered_chat, request)

    async def _prepared(self, kind: type[SamplingFields], endpoint: Any, request: Request) -> Response:
        return await prepared_answer(self._frontend, self._preparer.prepare, kind, endpoint, request)

    async def _generated(self, body: TokensRequest, request: Request) -> Response:
        return await answer(self._frontend, request, TokensFormat(self._frontend, request.state.prepared))

    async def _rendered_completion(self, body: CompletionRequest, request: Request) -> Response:
        return await self._rendered(request, "cmpl-", body.logprobs, many=True)

    async def _rendered_chat(self, body: ChatRequest, request: Request) -> Response:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return await self._rendered(request, "chatcmpl-", logprobs, many=False)

    async def _rendered(self, request: Request, prefix: str, logprobs: int | None, *, many: bool) -> Response:
        """Bodies for /inference/v1/generate.  Raises ApiError for an answer that needs the chat."""
        prepared: Prepared = request.state.prepared
        body, sampling = prepared.body, prepared.sampling
        await check_model(body.model, self._frontend, caller_of(request.scope))
        if prepared.parsers is not None and sampling.grammar is not None:
            what = "a grammar of tool calls, or after reasoning, can't be rendered"
            raise bad_request(f"{what}; send the chat to /v1/chat/completions", "messages")
        given = body.model_dump(include=set(SAMPLING), exclude_none=True)
        given |= {"logprobs": logprobs, "max_tokens": sampling.max_tokens}
        found = [
            {
                "request_id": f"{prefix}{name_request(request, body.request_id)}",
                "token_ids": token_ids,
                "sampling_params": {name: one for name, one in given.items() if one is not None},
                "model": body.model or self._frontend.model_name,
                "stream": bool(body.stream),
                "stream_options": None if body.stream_options is None else body.stream_options.model_dump(),
                "cache_salt": body.cache_salt,
                "priority": body.priority or 0,
                "features": None,
                "kv_transfer_params": None,
            }
            for token_ids in prepared.prompts
        ]
        headers = self._frontend.ignored_fields.note(prepared.ignored)
        return JsonResponse(found if many else found[0], headers=headers)
