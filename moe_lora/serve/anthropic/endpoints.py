# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from moe_lora.core.request import ModelInfo
from moe_lora.serve.access import caller_of
from moe_lora.serve.frontend import ABORTED, Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse, anthropic_body
from moe_lora.serve.openai.converted import AnswerBlock, BlockFormat
from moe_lora.serve.openai.endpoints import answer, prepared_answer
from moe_lora.serve.openai.generation import Delta
from moe_lora.serve.openai.parsers.answers import AnswerPart
from moe_lora.serve.openai.preparing import Prepared, Preparer
from moe_lora.serve.openai.prompt_bodies import check_model, check_total

from .request import CountedChat, MessagesChat

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer

MAX_COUNTED_TOKENS = 1 << 40
"""Replaces the context's length for counts."""

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageFormat(BlockFormat):
    """A message.  page_tokens: 0: no prefix cache."""

    id_prefix = "msg_"

    def __init__(self, tokenizer: Tokenizer, prepared: Prepared, page_tokens: int) -> None:
        super().__init__(tokenizer, prepared)
        self._page_tokens = page_tokens

    def whole_answer(self) -> dict[str, Any]:
        return self._message([_block(block) for block in self.blocks], **self._end()) | self.version()

    def opened(self) -> list[dict[str, Any]]:
        message = self._message([], stop_reason=None, stop_sequence=None)
        message["usage"] = {
            "input_tokens": len(self.prepared.prompts[0]),
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def block_opened(self, block: AnswerBlock) -> list[dict[str, Any]]:
        return [self._placed("content_block_start", content_block=_block(block, is_new=True))]

    def block_grown(self, block: AnswerBlock, text: str) -> list[dict[str, Any]]:
        kind, name = _DELTAS[block.kind]
        return [self._placed("content_block_delta", delta={"type": kind, name: text})]

    def block_closed(self, block: AnswerBlock) -> list[dict[str, Any]]:
        return [self._placed("content_block_stop")]

    def closed(self) -> list[dict[str, Any]]:
        ended = {"type": "message_delta", "delta": self._end(), "usage": self._usage(), **self.version()}
        return [ended, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [anthropic_body(error)]

    def _read(self, delta: Delta) -> list[AnswerPart]:
        """Raises ApiError for an aborted answer: no stop_reason means an abort."""
        if delta.finish_reason == "abort":
            raise ApiError(503, ABORTED)
        return super()._read(delta)

    def _placed(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": name, "index": len(self.blocks) - 1, **fields}

    def _end(self) -> dict[str, Any]:
        stop = self.matched_stop if isinstance(self.matched_stop, str) else None
        reason = "stop_sequence" if stop else _REASONS.get(self.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": stop}

    def _message(self, content: list[dict[str, Any]], **end: Any) -> dict[str, Any]:
        head = {"id": self.head["id"], "type": "message", "role": "assistant", "model": self.head["model"]}
        return {**head, "content": content, **end, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        cached, num = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        created = max(0, num - num % self._page_tokens - cached) if self._page_tokens else 0
        return {
            "input_tokens": num - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
        }


def _block(block: AnswerBlock, *, is_new: bool = False) -> dict[str, Any]:
    if block.call is not None:
        found = {} if is_new else block.arguments()
        return {"type": "tool_use", "id": block.call.call_id, "name": block.call.name, "input": found}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text, "citations": None}


class Endpoints:
    """Endpoints of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def create(self, request: Request) -> Response:
        return await prepared_answer(
            self._frontend, self._preparer.prepare, MessagesChat, self._answer, request
        )

    async def count(self, request: Request) -> Response:
        """Tokens of the prompt, also beyond the context."""
        return await prepared_answer(self._frontend, self._prepare, CountedChat, self._counted, request)

    async def _answer(self, body: MessagesChat, request: Request) -> Response:
        assert self._frontend.tokenizer is not None
        has_cache, info = (
            self._frontend.cluster.engine.prefix_caching,
            await self._frontend.client.model_info(),
        )
        page_tokens = info.block_size if has_cache else 0
        form = MessageFormat(self._frontend.tokenizer, request.state.prepared, page_tokens)
        return await answer(self._frontend, request, form)

    async def _prepare(self, kind: Any, content: bytearray, info: ModelInfo, scope: Scope) -> Prepared:
        return await self._preparer.prepare(
            kind, content, replace(info, max_model_len=MAX_COUNTED_TOKENS), scope
        )

    async def _counted(self, body: MessagesChat, request: Request) -> Response:
        """Raises ApiError for an unknown model."""
        prepared: Prepared = request.state.prepared
        await check_model(body.model, self._frontend, caller_of(request.scope))
        num_tokens = len(prepared.prompts[0])
        check_total(num_tokens, self._frontend.limits, "messages")
        headers = self._frontend.ignored_fields.note(prepared.ignored)
        return JsonResponse({"input_tokens": num_tokens}, headers=headers)
