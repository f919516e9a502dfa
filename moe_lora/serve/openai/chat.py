"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import bad_request

from .answers import answer, chat_logprobs, name_request
from .generation import Delta, Generation, GenerationPlan
from .protocol import ChatRequest, whole_characters


class ChatFormat:
    """Choices as /v1/chat/completions shows them; a stream names the role first."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, frontend: Frontend, *, with_token_ids: bool) -> None:
        self._frontend = frontend
        self._with_token_ids = with_token_ids
        self._greeted: set[int] = set()

    def chunk(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.index not in self._greeted:
            self._greeted.add(delta.index)
            role = {"role": "assistant", "content": ""}
            chunks.append({"index": delta.index, "delta": role, "logprobs": None, "finish_reason": None})
        chunks.append(self._choice(delta, "delta", {"content": delta.text}))
        return chunks

    def whole(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, "message", {"role": "assistant", "content": delta.text, "refusal": None})

    def _choice(self, delta: Delta, key: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = chat_logprobs(self._frontend.tokenizer, delta.token_ids, delta.logprobs)
        choice = {
            "index": delta.index,
            key: message,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice


def chat_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["generate"])

    async def prompt_of(body: ChatRequest) -> list[int]:
        tokenizer = frontend.need_tokenizer("/v1/chat/completions")
        try:
            messages = [message.for_template() for message in body.messages]
            text = whole_characters(
                tokenizer.render_chat(
                    messages,
                    add_generation_prompt=body.add_generation_prompt,
                    variables=body.chat_template_kwargs,
                )
            )
        except ValueError as error:
            raise bad_request(str(error), "messages") from error
        return await frontend.encode(text, add_special_tokens=body.add_special_tokens)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        body.check()
        sampling = body.to_sampling()
        prompt = await prompt_of(body)
        await frontend.check_prompt(prompt, sampling)
        plan = GenerationPlan(
            request_id=f"chatcmpl-{name_request(request, body.request_id)}",
            adapter=frontend.adapter_of(body.model),
            prompts=(tuple(prompt),),
            num_choices=body.num_choices,
            sampling=await frontend.for_engine(sampling),
            continues_prompt=False,
        )
        return await answer(
            request,
            Generation(frontend, plan),
            ChatFormat(frontend, with_token_ids=bool(body.return_token_ids)),
            model=body.model or frontend.model_name,
            stream=bool(body.stream),
            usage=body.usage_in_stream,
        )

    return router
