# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: call:NAME{key:value,…}; texts lie between two quotes <|"|>."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .machine import MAX_HEADER_CHARS, Parser, held_chars
from .tagged_calls import ANY, as_json

QUOTE = '<|"|>'
_HEADER = re.compile(r"\s*call:\s*([^\s{}<>]+)\s*(?=\{)")
_KEY = re.compile(
    rf"(?:{re.escape(QUOTE)}(?P<quoted>.*?){re.escape(QUOTE)}|(?P<plain>[^:{{}}<>]+?))\s*:", re.S
)
_BARE = re.compile(r"([^,}\]<{[]+)(?=[,}\]])")
_CLOSING = {"{": "}", "[": "]"}


class Gemma4Calls(Parser):
    """Arguments become JSON piece by piece."""

    OPEN = ("<|tool_call>",)
    CLOSE = "<tool_call|>"
    MARKS = (QUOTE,)

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._open: list[str] = []
        """Brackets around the place."""

    def _header(self) -> bool:
        found = _HEADER.match(self._rest, 0, MAX_HEADER_CHARS)
        if found is None:
            may_follow = len(self._rest) < MAX_HEADER_CHARS and self.CLOSE not in self._rest
            if may_follow and not self._ended:
                return False
            self._reject()
            return True
        self._consume(found.end())
        self._start_call(found[1])
        self._open, self._state = [], self._value
        return True

    def _skip_gap(self) -> bool:
        """Drop white space.  False: no text is left."""
        self._consume(len(self._rest) - len(self._rest.lstrip()))
        return bool(self._rest)

    def _wait(self, *, may_follow: bool) -> bool:
        """Wait for text, or end the call."""
        may_follow = may_follow and len(self._rest) < MAX_HEADER_CHARS
        if may_follow and not self._ended:
            return False
        self._end_call("cut" if may_follow else "end")
        return True

    def _value(self) -> bool:
        """The start of a value."""
        if not self._skip_gap():
            return self._wait(may_follow=True)
        first = self._rest[0]
        if self._rest.startswith(QUOTE):
            self._consume(len(QUOTE))
            self._emit("arguments", '"')
            self._state = self._text
        elif first in _CLOSING:
            self._consume(1)
            self._open.append(first)
            self._emit("arguments", first)
            self._state = self._first
        elif (found := _BARE.match(self._rest, 0, MAX_HEADER_CHARS)) and self._open:
            self._consume(found.end())
            self._emit("arguments", as_json(found[1].strip(), ANY))
            self._state = self._after
        else:
            may_follow = QUOTE.startswith(self._rest) or re.fullmatch(r"[^,}\]<{[]+", self._rest) is not None
            return self._wait(may_follow=may_follow)
        return True

    def _first(self) -> bool:
        """After an opening bracket."""
        if not self._skip_gap():
            return self._wait(may_follow=True)
        if self._rest[0] == _CLOSING[self._open[-1]]:
            self._state = self._after
        else:
            self._state = self._key if self._open[-1] == "{" else self._value
        return True

    def _key(self) -> bool:
        if not self._skip_gap():
            return self._wait(may_follow=True)
        found = _KEY.match(self._rest, 0, MAX_HEADER_CHARS)
        if found is None:
            is_quoted = self._rest.startswith(QUOTE) or QUOTE.startswith(self._rest)
            return self._wait(may_follow=is_quoted or re.search("[{}<>]", self._rest) is None)
        self._consume(found.end())
        key = found["plain"] if found["quoted"] is None else found["quoted"]
        self._emit("arguments", f"{json.dumps(key, ensure_ascii=False)}: ")
        self._state = self._value
        return True

    def _text(self) -> bool:
        """A text, passed on in pieces."""
        end = self._rest.find(QUOTE)
        num = end if end >= 0 else len(self._rest) - held_chars(self._rest, (QUOTE,))
        self._emit("arguments", json.dumps(self._consume(num), ensure_ascii=False)[1:-1])
        if end < 0:
            if self._ended:
                self._end_call("cut")
            return self._ended
        self._consume(len(QUOTE))
        self._emit("arguments", '"')
        self._state = self._after
        return True

    def _after(self) -> bool:
        """After a value: a comma, or a bracket."""
        if not self._skip_gap():
            return self._wait(may_follow=True)
        first = self._rest[0]
        if first == ",":
            self._consume(1)
            self._emit("arguments", ", ")
            self._state = self._key if self._open[-1] == "{" else self._value
        elif first == _CLOSING[self._open[-1]]:
            self._consume(1)
            self._open.pop()
            self._emit("arguments", first)
            self._state = self._after if self._open else self._close
        else:
            self._end_call()
        return True
