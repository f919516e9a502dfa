# SPDX-License-Identifier: Apache-2.0
"""Chats with SGLang's `separate_reasoning` or `stream_reasoning`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_lora.serve.openai.endpoints import ChatFormat
from moe_lora.serve.openai.generation import Delta

_NAMES = ("reasoning_content", "reasoning")


class SeparateChat(ChatFormat):
    """A format with `reasoning_content`.  streams: False: one event has the reasoning."""

    def __init__(self, form: ChatFormat, *, streams: bool) -> None:
        self.text, self.reasoning_tokens, self.watch = form.text, form.reasoning_tokens, form.watch
        self._form, self._streams = form, streams
        self._held: dict[int, str] = {}

    def show_at_end(self, name: str, value_of: Callable[[int], object]) -> None:
        self._form.show_at_end(name, value_of)

    def token_text(self, token_id: int, *, is_first: bool = False) -> str:
        return self._form.token_text(token_id, is_first=is_first)

    def opening(self, index: int) -> dict[str, Any] | None:
        found = self._form.opening(index)
        return None if found is None else _with_name(found, "delta")

    def beside(self, index: int) -> dict[str, Any]:
        self._form.prompt_of = self.prompt_of
        return self._form.beside(index)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        entry = self._form.chunk(delta)
        if not self._streams:
            self._hold(entry["delta"], delta)
        return _with_name(entry, "delta")

    def whole(self, delta: Delta) -> dict[str, Any]:
        return _with_name(self._form.whole(delta), "message")

    def _hold(self, shown: dict[str, Any], delta: Delta) -> None:
        """Keep the reasoning until the next piece or end."""
        held = self._held.pop(delta.index, "") + shown.pop("reasoning_content", "")
        shown.pop("reasoning", None)
        if held and not any(shown.values()) and delta.finish_reason is None:
            self._held[delta.index] = held
        elif held:
            shown |= dict.fromkeys(_NAMES, held)


def _with_name(entry: dict[str, Any], key: str) -> dict[str, Any]:
    entry[key].setdefault("reasoning_content", None)
    return entry
