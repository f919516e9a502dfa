# SPDX-License-Identifier: Apache-2.0
"""Reasoning between two marks at an answer's start."""

from __future__ import annotations

from typing import NamedTuple

from .machine import MAX_GAP_CHARS, Event, Parser, held_chars, without_gap


class Marks(NamedTuple):
    """Marks around the reasoning.

    is_open: an answer without the opening mark is reasoning.  label: dropped after the opening mark.
    """

    opening: str
    closing: str
    is_open: bool = False
    label: str = ""


THINK = Marks("<think>", "</think>")
REASONING_FORMATS = {
    "qwen3": THINK,
    "deepseek_r1": Marks("<think>", "</think>", is_open=True),
    "deepseek_v3": THINK,
    "glm4": THINK,
    "kimi": THINK,
    "gemma4": Marks("<|channel>", "<channel|>", label="thought\n"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


class Plain(Parser):
    """All text is content."""

    def _content(self) -> bool:
        self._emit("content", self._consume(len(self._rest)))
        return False


class Thinking(Parser):
    """Reasoning, then the answer for another parser; drops white space around the reasoning.

    is_open: the prompt ends in the reasoning.
    """

    def __init__(self, marks: Marks, answer: Parser, *, is_open: bool) -> None:
        super().__init__({})
        self._marks, self._answer = marks, answer
        self._is_open, self._has_begun = is_open, False
        self._state = self._start

    def _start(self) -> bool:
        gap, opening = self._gap_chars(), self._marks.opening
        rest = self._rest[gap : gap + len(opening)]
        if opening.startswith(rest) and rest != opening and not self._ended and gap <= MAX_GAP_CHARS:
            return False
        if rest == opening and gap <= MAX_GAP_CHARS:
            self._consume(gap + len(opening))
            self._state = self._label
            return True
        self._state = self._reasoning if self._is_open else self._content
        return True

    def _label(self) -> bool:
        label = self._marks.label
        if label.startswith(self._rest) and self._rest != label and not self._ended:
            return False
        self._consume(len(label) * self._rest.startswith(label))
        self._state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        closing = self._marks.closing
        end = self._rest.find(closing)
        if end < 0:
            held = 0 if self._ended else held_chars(self._rest, (closing,))
            self._emit_stripped(self._rest[: len(self._rest) - held])
            return False
        self._emit_stripped(self._rest[:end])
        self._consume(self._rest.find(closing) + len(closing))
        self._state = self._gap
        return True

    def _emit_stripped(self, text: str) -> None:
        """Emit the text without outer white space; trailing white space stays in the buffer."""
        if not self._has_begun:
            self._consume(len(text) - len(text.lstrip()))
            text = text.lstrip()
            self._has_begun = bool(text)
        self._emit("reasoning", self._consume(len(without_gap(text, None))))

    def _gap(self) -> bool:
        """White space between reasoning and answer."""
        self._rest = self._rest.lstrip()
        if not self._rest:
            return False
        self._state = self._content
        return True

    def _content(self) -> bool:
        self._events += self._answer.push(self._consume(len(self._rest)))
        return False

    def end(self) -> list[Event]:
        return [*super().end(), *self._answer.end()]
