# SPDX-License-Identifier: Apache-2.0
"""Answers of /v1/responses."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.openai.converted import AnswerBlock, BlockFormat

from .request import ENCRYPTED, ID_PREFIX, encrypted, messages_of
from .store import STORE_HEADERS, Stored

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer
    from moe_lora.serve.openai.preparing import Prepared

    from .store import ResponseStore

_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}
_STATUSES = {"length": "incomplete", "abort": "cancelled"}


class ResponseFormat(BlockFormat):
    """One response.  store: gets the finished response, unless None."""

    id_prefix = ID_PREFIX

    def __init__(self, tokenizer: Tokenizer, prepared: Prepared, store: ResponseStore, owner: str) -> None:
        super().__init__(tokenizer, prepared)
        self._echoed = self.chat.shown
        self.response_id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self._store = None if self._echoed["input"] is None else store
        self.owner = owner
        self._num_events = 0

    def headers(self) -> dict[str, str]:
        return {} if self._store is None else STORE_HEADERS

    def whole_answer(self) -> dict[str, Any]:
        for block in self.blocks:
            self._name(block)
        return self._finished()

    def opened(self) -> list[dict[str, Any]]:
        started = self._response("in_progress")
        return [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]

    def block_opened(self, block: AnswerBlock) -> list[dict[str, Any]]:
        self._name(block)
        item = self._item(block, "in_progress")
        events = [self._placed("response.output_item.added", item=item)]
        if block.kind != "call":
            part = _part(block)
            events.append(self._of_block("response.content_part.added", block, part=part))
        return events

    def block_grown(self, block: AnswerBlock, text: str) -> list[dict[str, Any]]:
        more: dict[str, Any] = {"logprobs": self._logprobs} if block.kind == "content" else {}
        return [self._of_block(f"response.{_subject(block)}.delta", block, delta=text, **more)]

    def block_closed(self, block: AnswerBlock) -> list[dict[str, Any]]:
        done, item = f"response.{_subject(block)}.done", self._item(block)
        if block.call is not None:
            events = [self._of_block(done, block, arguments=block.text, name=block.call.name)]
        else:
            more: dict[str, Any] = {"logprobs": block.logprobs} if block.kind == "content" else {}
            events = [
                self._of_block(done, block, text=block.text, **more),
                self._of_block("response.content_part.done", block, part=_part(block)),
            ]
        return [*events, self._placed("response.output_item.done", item=item)]

    def closed(self) -> list[dict[str, Any]]:
        found = self._finished()
        name = "completed" if found["status"] == "completed" else "incomplete"  # no event for "cancelled"
        return [self._event(f"response.{name}", response=found)]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        found = self._response("failed")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        found["error"] = {"code": code, "message": error.message}
        return [self._event("response.failed", response=found)]

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _placed(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return self._event(name, output_index=len(self.blocks) - 1, **fields)

    def _of_block(self, name: str, block: AnswerBlock, /, **fields: Any) -> dict[str, Any]:
        place = {} if block.kind == "call" else {"content_index": 0}
        return self._placed(name, item_id=block.item_id, **place, **fields)

    def _name(self, block: AnswerBlock) -> None:
        block.item_id = f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}"

    def _item(self, block: AnswerBlock, status: str | None = None) -> dict[str, Any]:
        is_new = status is not None
        status = status or ("incomplete" if block.is_cut else "completed")
        head = {"id": block.item_id, "status": status}
        if block.call is not None:
            call = {"call_id": block.call.call_id, "name": block.call.name, "arguments": block.text}
            return {"type": "function_call", **head, **call}
        parts = [] if is_new else [_part(block)]
        if block.kind == "content":
            return {"type": "message", **head, "role": "assistant", "content": parts}
        hidden = (
            encrypted(block.text) if not is_new and ENCRYPTED in (self._echoed["include"] or ()) else None
        )
        return {"type": "reasoning", **head, "summary": [], "content": parts, "encrypted_content": hidden}

    def _finished(self) -> dict[str, Any]:
        if self.finish_reason == "abort":
            self._store = None
        status = _STATUSES.get(self.finish_reason or "", "completed")
        found = self._response(status)
        if status == "completed":
            found["completed_at"] = int(time.time())
        elif status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        found["output"] = [self._item(block) for block in self.blocks]
        found |= {"usage": self._usage(), **self.version()}
        if self._store is not None:
            self._store.add(self._stored(found))
        return found

    def _stored(self, found: dict[str, Any]) -> Stored:
        """Malformed calls are content, also after a stream."""
        streamed = self.blocks
        self._join_malformed()
        if self.blocks != streamed:
            self._finish()
            for block in self.blocks:
                if not block.item_id:
                    self._name(block)
            found = {**found, "output": [self._item(block) for block in self.blocks]}
        return Stored.of(self.owner, found, self._echoed["input"], messages_of(found["output"], {}))

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
            **{name: usage[name] for name in ("prompt_tokens", "completion_tokens")},
        }

    def _response(self, status: str) -> dict[str, Any]:
        shown, sampling = self._echoed, self.prepared.sampling
        reasoning, text = shown["reasoning"] or {}, shown["text"] or {}
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": None,
            "status": status,
            "background": bool(shown["background"]),
            "error": None,
            "incomplete_details": None,
            "instructions": shown["instructions"],
            "max_output_tokens": shown["max_output_tokens"],
            "max_tool_calls": None,
            "metadata": shown["metadata"] or {},
            "model": self.head["model"],
            "output": [],
            "parallel_tool_calls": shown["parallel_tool_calls"] is not False,
            "previous_response_id": shown["previous_response_id"],
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": self._store is not None,
            "temperature": sampling.temperature,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": shown["tool_choice"] or "auto",
            "tools": shown["tools"] or [],
            "top_logprobs": shown["top_logprobs"] or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _subject(block: AnswerBlock) -> str:
    """The block's text in names of events."""
    names = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
    return names[block.kind]


def _part(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}
