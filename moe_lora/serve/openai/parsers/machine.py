# SPDX-License-Identifier: Apache-2.0
"""The state machine of all formats: text in, events out, in linear time.

Events do not depend on the cuts between pieces: a state reads its buffer only as far as later text cannot
change the result.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic_core import from_json

MAX_HEADER_CHARS = 1024
"""Longest text between mark and arguments."""
MAX_GAP_CHARS = 256
"""Longest white space that a state looks over."""
MAX_HELD_CHARS = 1 << 16
"""Longest held text: a typed value, or an object with the name late."""
CHUNK_CHARS = 1024
"""Characters added to the buffer at once."""
_OUTSIDE_STRINGS = frozenset(" \t\r\n:,0123456789+-.eEtrufalsn")

Kind = Literal["content", "reasoning", "call", "arguments", "end", "cut"]


class Event(NamedTuple):
    """A piece of an answer.

    kind: "content" and "reasoning" have text; "call" has its name; "arguments" has a piece of JSON; "end" and
    "cut" (the answer ends first) have the call's source.  call_id: of the model, or "".
    """

    kind: Kind
    text: str
    call_id: str = ""


def held_chars(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end that may start a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


def without_gap(text: str, gap: str | None) -> str:
    """The text without up to MAX_GAP_CHARS of these characters at its end.  gap: None: white space."""
    head = text[:-MAX_GAP_CHARS]
    return head + text[len(head) :].rstrip(gap)


def is_object(text: str) -> bool:
    """True for an object in JSON."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def object_start(text: str) -> dict[str, Any] | None:
    """Whole values of a cut object, or None."""
    try:
        found = from_json(text.strip() or "{", allow_partial=True)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class JsonScan:
    """Finds the end of a JSON value.  depth: open brackets.

    broken: the next character is not JSON.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False
        self.done = self.broken = False

    def feed(self, text: str) -> int:
        """The number of characters in the value."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
            elif char not in _OUTSIDE_STRINGS:
                self.broken = True
                return at
        return len(text)


class Parser:
    """Splits one answer into content and calls.  tools: name -> JSON schema of the parameters.

    OPEN: marks before a call.  NOISE: dropped marks.  MARKS: further special tokens.  GAP: characters dropped
    before a mark.  CLOSE: mark after a call; "": none.  FILLER: meaningless characters before CLOSE.  SHAPES:
    templates' text from a trigger to the arguments, and after the arguments.  TRIGGERS: else OPEN.  LEADS:
    calls start the answer.
    """

    OPEN: ClassVar[tuple[str, ...]] = ()
    NOISE: ClassVar[tuple[str, ...]] = ()
    MARKS: ClassVar[tuple[str, ...]] = ()
    GAP: ClassVar[str] = " \t\r\n"
    CLOSE: ClassVar[str] = ""
    FILLER: ClassVar[str] = " \t\r\n"
    SHAPES: ClassVar[tuple[tuple[str, str], ...]] = ()
    TRIGGERS: ClassVar[tuple[str, ...]] = ()
    LEADS: ClassVar[bool] = False

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = tools
        self._rest = ""
        self._source: list[str] | None = None
        """Text of the current call, or None."""
        self._ended = self._had_call = False
        self._events: list[Event] = []
        self._state = self._content

    @staticmethod
    def new_id(name: str, index: int) -> str:
        """The id of a call without the model's id."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def push(self, text: str) -> list[Event]:
        """Events made certain by further text."""
        self._events = []
        self._feed(text)
        return self._events

    def end(self) -> list[Event]:
        """The remaining events."""
        self._ended, self._events = True, []
        while self._state():
            pass
        return self._events

    def _feed(self, text: str) -> None:
        for start in range(0, len(text), CHUNK_CHARS):
            self._rest += text[start : start + CHUNK_CHARS]
            while self._state():
                pass

    def _read_again(self, text: str) -> None:
        """Put the text before the buffer, for this state."""
        ended, text, self._rest = self._ended, text + self._rest, ""
        self._ended = False
        self._feed(text)
        self._ended = ended

    def _emit(self, kind: Kind, text: str, call_id: str = "") -> None:
        if text or kind in ("end", "cut"):
            self._events.append(Event(kind, text, call_id))

    def _consume(self, num_chars: int) -> str:
        text, self._rest = self._rest[:num_chars], self._rest[num_chars:]
        if self._source is not None:
            self._source.append(text)
        return text

    def _source_text(self) -> str:
        return "".join(self._source or ())

    def _gap_chars(self, chars: str | None = None) -> int:
        """The number of these characters at the start, up to MAX_GAP_CHARS + 1.  chars: None: white space."""
        head = self._rest[: MAX_GAP_CHARS + 1]
        return len(head) - len(head.lstrip(chars))

    def _content(self) -> bool:
        """Content up to the next mark."""
        marks = self.OPEN + self.NOISE
        found = re.search("|".join(map(re.escape, marks)), self._rest) if marks else None
        if found is None:
            held = 0
            if not self._ended:
                head = self._rest[: len(self._rest) - held_chars(self._rest, marks)]
                held = len(self._rest) - len(without_gap(head, self.GAP))
            text = self._consume(len(self._rest) - held)
            if text.strip() or not (self._ended and self._had_call):
                self._emit("content", text)
            return False
        self._emit("content", without_gap(self._consume(found.start()), self.GAP))
        self._source = []
        if self._consume(len(found[0])) in self.OPEN:
            self._state = self._header
        else:
            self._source = None
        return True

    def _header(self) -> bool:
        """From an opening mark to the call's name."""
        raise NotImplementedError

    def _start_call(self, name: str, call_id: str = "") -> None:
        self._emit("call", name, call_id)
        self._had_call = True

    def _end_call(self, kind: Kind = "end") -> None:
        self._emit(kind, self._source_text())
        self._source, self._state = None, self._content

    def _close(self) -> bool:
        """From the arguments to the call's end."""
        filler = self._gap_chars(self.FILLER)
        rest = self._rest[filler : filler + len(self.CLOSE)]
        if filler <= MAX_GAP_CHARS:
            if rest == self.CLOSE:
                self._consume(filler + len(self.CLOSE))
            elif self.CLOSE.startswith(rest) and not self._ended:
                return False
        self._end_call()
        return True

    def _reject(self) -> None:
        """The mark is content, not a call."""
        self._emit("content", self._source_text())
        self._source, self._state = None, self._content
