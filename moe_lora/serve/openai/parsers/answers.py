# SPDX-License-Identifier: Apache-2.0
"""Choices with tool calls and reasoning."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from moe_lora.engine.text.text import Tokenizer
from moe_lora.serve.openai.endpoints import ChatFormat
from moe_lora.serve.openai.generation import Delta

from .choice import AnswerParsers
from .machine import Event, is_object, object_start


class MarkedText:
    """A tokenizer with some special tokens as text."""

    def __init__(self, tokenizer: Tokenizer, marks: frozenset[str]) -> None:
        self._decode = tokenizer.decode
        self.special_ids = hidden_ids(tokenizer, marks)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, skip_special_tokens=False)


@lru_cache(maxsize=16)
def hidden_ids(tokenizer: Tokenizer, marks: frozenset[str]) -> frozenset[int]:
    """Special tokens that are not text."""
    ids = tokenizer.special_ids
    return frozenset(one for one in ids if tokenizer.decode([one], skip_special_tokens=False) not in marks)


@dataclass
class ToolCall:
    """A call of one choice.  source: its text, after its end."""

    index: int
    call_id: str
    name: str
    from_char: int = 0
    parts: list[str] = field(default_factory=list)
    source: str = ""
    is_cut: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.parts)

    def shown(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}

    def is_valid(self) -> bool:
        """True for an ended call with an object as arguments."""
        return not self.is_cut and is_object(self.arguments)

    def is_shown(self, *, at_limit: bool) -> bool:
        """True for a valid call, or one cut by a limit."""
        return self.is_valid() or (at_limit and self.is_cut and object_start(self.arguments) is not None)


@dataclass
class Pieces:
    """New pieces of an answer; calls: by index."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)


class AnswerPart(NamedTuple):
    """A new text.  kind: content, reasoning or call."""

    kind: str
    text: str
    call: ToolCall | None = None


class ParsedChoice:
    """The parser of one choice, and its calls."""

    def __init__(self, parsers: AnswerParsers) -> None:
        self._parsers = parsers
        self._parser, self._new_id = parsers.new(), parsers.new_id
        self.calls: list[ToolCall] = []
        self.has_reasoning = self.has_answer = self._is_full = False
        self._num_chars = 0

    def read(self, text: str, *, ended: bool) -> Pieces:
        known = len(self.calls)
        texts: defaultdict[str | int, list[str]] = defaultdict(list)
        for part in self.parts(text, ended=ended):
            texts[part.kind if part.call is None else part.call.index].append(part.text)
        pieces = Pieces("".join(texts.pop("content", ())), "".join(texts.pop("reasoning", ())))
        for index, parts in texts.items():
            call = self.calls[int(index)]
            is_new = call.index >= known
            shown = call.shown() if is_new else {"function": {"arguments": "".join(parts)}}
            pieces.calls[call.index] = {"index": call.index, **shown}
        return pieces

    def parts(self, text: str, *, ended: bool) -> list[AnswerPart]:
        """New texts in the order of the answer."""
        events = [*self._parser.push(text), *(self._parser.end() if ended else ())]
        return [part for event in events if (part := self._part(event)) is not None]

    def _part(self, event: Event) -> AnswerPart | None:
        if event.kind == "content":
            self._num_chars += len(event.text)
            return AnswerPart(event.kind, event.text)
        if event.kind == "reasoning":
            self.has_reasoning = True
            return AnswerPart(event.kind, event.text) if self._parsers.shows_reasoning else None
        if event.kind == "call":
            index = len(self.calls)
            call_id = event.call_id or self._new_id(event.text, index)
            self.calls.append(ToolCall(index, call_id, event.text, self._num_chars))
            return self._part_of_call("")
        call = self.calls[-1]
        if event.kind == "arguments":
            call.parts.append(event.text)
            return self._part_of_call(event.text)
        call.source, call.is_cut = event.text, event.kind == "cut"
        self._is_full = self._is_full or (not self._parsers.parallel and call.is_valid())
        return None

    def _part_of_call(self, text: str) -> AnswerPart | None:
        """A text of the newest call; None after a choice's single call."""
        return None if self._is_full else AnswerPart("call", text, self.calls[-1])

    def whole(self, text: str, *, at_limit: bool = False) -> tuple[Pieces, list[ToolCall]]:
        """The answer in one piece.  Malformed calls become content; at a limit, cut calls stay."""
        pieces = self.read(text, ended=True)
        kept: list[ToolCall] = []
        content: list[str] = []
        start = 0
        for call in self.calls:
            if call.is_shown(at_limit=at_limit):
                kept.append(call)
            else:
                content += pieces.content[start : call.from_char], call.source
                start = call.from_char
        pieces.content = "".join((*content, pieces.content[start:]))
        return pieces, kept if self._parsers.parallel else kept[:1]


class ParsedChat(ChatFormat):
    """Choices of /v1/chat/completions through parsers."""

    def __init__(self, tokenizer: Tokenizer, parsers: AnswerParsers, *, with_token_ids: bool) -> None:
        super().__init__(tokenizer, with_token_ids=with_token_ids)
        self.text = MarkedText(tokenizer, parsers.marks())
        self._parsers = parsers
        self._choices: dict[int, ParsedChoice] = {}
        self._counts: dict[int, int] = {}
        """Tokens of each choice before its answer."""
        if parsers.reasoning:
            self.reasoning_tokens, self.watch = Counter(), self._read

    def chunk(self, delta: Delta) -> dict[str, Any]:
        pieces, choice = self._read(delta), self._choices[delta.index]
        shown: dict[str, Any] = {}
        if pieces.reasoning:
            shown["reasoning_content"] = shown["reasoning"] = pieces.reasoning
        if pieces.content:
            shown["content"] = pieces.content
        if pieces.calls:
            shown["tool_calls"] = list(pieces.calls.values())
        return _finished(self.entry(delta, "delta", shown), choice.calls)

    def _read(self, delta: Delta) -> Pieces:
        """New pieces; counts reasoning tokens before the answer."""
        index = delta.index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = ParsedChoice(self._parsers)
        pieces = choice.read(delta.text, ended=delta.finish_reason is not None)
        if self.reasoning_tokens is not None and not choice.has_answer:
            choice.has_answer = bool(pieces.content or pieces.calls)
            if not choice.has_answer:
                self._counts[index] = self._counts.get(index, 0) + len(delta.token_ids)
            if choice.has_reasoning:
                self.reasoning_tokens[index] = self._counts.get(index, 0)
        return pieces

    def whole(self, delta: Delta) -> dict[str, Any]:
        at_limit = delta.finish_reason != "stop"
        pieces, calls = ParsedChoice(self._parsers).whole(delta.text, at_limit=at_limit)
        is_empty = not pieces.content and bool(calls or pieces.reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if is_empty else pieces.content,
            "refusal": None,
        }
        if self._parsers.reasoning:
            message["reasoning_content"] = message["reasoning"] = pieces.reasoning or None
        if calls:
            message["tool_calls"] = [call.shown() for call in calls]
        return _finished(self.entry(delta, "message", message), calls)


def _finished(entry: dict[str, Any], calls: Iterable[ToolCall]) -> dict[str, Any]:
    if entry["finish_reason"] == "stop" and any(call.is_valid() for call in calls):
        entry["finish_reason"] = "tool_calls"
    return entry
