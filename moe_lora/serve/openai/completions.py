"""POST /v1/completions: text or token-id prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from moe_lora.serve.frontend import Frontend

from .answers import CompletionLogprobs, answer, name_request
from .generation import Delta, Generation, GenerationPlan
from .protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16
"""As in the OpenAI interface; less where the context has less room."""


class CompletionFormat:
    """Choices as /v1/completions shows them."""

    object_name = chunk_object_name = "text_completion"

    def __init__(self, frontend: Frontend, *, with_token_ids: bool) -> None:
        self._frontend = frontend
        self._with_token_ids = with_token_ids
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def chunk(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.whole(delta)]

    def whole(self, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            collected = self._logprobs.setdefault(delta.index, CompletionLogprobs(self._frontend.tokenizer))
            logprobs = collected.take(delta.token_ids, delta.logprobs)
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice


def completions_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["generate"])

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue each prompt."""
        body.check()
        sampling = body.to_sampling()
        if sampling.stop:
            frontend.need_tokenizer("stop (other than stop_token_ids)")
        prompts = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                prompt = await frontend.encode(prompt, add_special_tokens=body.add_special_tokens)
            await frontend.check_prompt(prompt, sampling)
            prompts.append(tuple(prompt))
        if sampling.max_tokens is None:
            room = (await frontend.info()).max_model_len - max(map(len, prompts))
            default = max(DEFAULT_MAX_TOKENS, sampling.min_tokens)
            sampling = replace(sampling, max_tokens=min(default, room))
        plan = GenerationPlan(
            request_id=f"cmpl-{name_request(request, body.request_id)}",
            adapter=frontend.adapter_of(body.model),
            prompts=tuple(prompts),
            num_choices=body.num_choices,
            sampling=await frontend.for_engine(sampling),
            continues_prompt=True,
        )
        # Without a tokenizer the ids are all there is to give.
        with_token_ids = bool(body.return_token_ids) or frontend.tokenizer is None
        return await answer(
            request,
            Generation(frontend, plan),
            CompletionFormat(frontend, with_token_ids=with_token_ids),
            model=body.model or frontend.model_name,
            stream=bool(body.stream),
            usage=body.usage_in_stream,
        )

    return router
