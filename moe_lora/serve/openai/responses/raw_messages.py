# SPDX-License-Identifier: Apache-2.0
"""Responses with raw prompt and answer (vLLM's enable_response_messages)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_lora.serve.openai.generation import Delta

from .answer import ResponseFormat

if TYPE_CHECKING:
    from moe_lora.serve.openai.parsers.answers import AnswerPart


class RawFormat(ResponseFormat):
    """A response with `input_messages` and `output_messages`."""

    _token_ids: tuple[int, ...] = ()

    def _read(self, delta: Delta) -> list[AnswerPart]:
        self._token_ids += tuple(delta.token_ids)
        return super()._read(delta)

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **super()._response(status),
            "input_messages": [self._raw(self.prepared.prompts[0])],
            "output_messages": [self._raw(self._token_ids)],
        }

    def _raw(self, token_ids: Sequence[int]) -> dict[str, Any]:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}
