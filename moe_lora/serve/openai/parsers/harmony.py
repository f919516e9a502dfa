# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS's harmony: analysis is reasoning, final is content, commentary to `functions.NAME` is a call, else
content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .machine import MAX_GAP_CHARS, MAX_HEADER_CHARS, JsonScan, Kind, Parser, held_chars

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "functions."
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BEGINNINGS = (START, CHANNEL, MESSAGE, "to=")


class Harmony(Parser):
    OPEN = (CHANNEL, START)
    MARKS = (MESSAGE, CONSTRAIN, *ENDS)
    TRIGGERS = (f"to={FUNCTIONS}",)
    SHAPES = tuple(
        (f"to={FUNCTIONS}NAME{middle}{MESSAGE}", ENDS[1])
        for middle in (" <|constrain|>json", " json", "", f"{CHANNEL}commentary json", f"{CHANNEL}commentary")
    )

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._state = self._between
        self._kind: Kind = "content"
        self._has_text = self._has_reasoning = self._has_message = False
        self._scan = JsonScan()

    def _between(self) -> bool:
        """Before a message's header."""
        gap = self._gap_chars()
        rest = self._rest[gap : gap + max(map(len, _BEGINNINGS))]
        if gap <= MAX_GAP_CHARS:
            if rest.startswith(_BEGINNINGS):
                self._source, self._state = [], self._header
                return True
            if not self._ended and any(mark.startswith(rest) for mark in _BEGINNINGS):
                return False
        self._state = self._content
        return True

    def _header(self) -> bool:
        at = self._rest.find(MESSAGE, 0, MAX_HEADER_CHARS)
        if at < 0:
            if len(self._rest) < MAX_HEADER_CHARS and not self._ended:
                return False
            if self._ended and self._has_message:
                self._rest = ""
                return False
            self._consume(len(self._rest) if self._ended else MAX_HEADER_CHARS)
            self._reject()
            return True
        self._consume(at + len(MESSAGE))
        header = self._source_text()
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1]
        self._has_text, self._has_message = False, True
        if name.startswith(FUNCTIONS) and len(name) > len(FUNCTIONS):
            self._start_call(name.removeprefix(FUNCTIONS))
            self._kind, self._scan = "arguments", JsonScan()
        else:
            is_reasoning = bool(name) or (channel is not None and channel[1] == "analysis")
            self._kind = "reasoning" if is_reasoning else "content"
            self._source = None
        self._state = self._body
        return True

    def _body(self) -> bool:
        if self._kind == "arguments" and not (self._scan.done or self._scan.broken):
            self._emit_body(self._consume(self._scan.feed(self._rest)))
        marks = (*ENDS, START, CHANNEL)
        found = re.search("|".join(map(re.escape, marks)), self._rest)
        if found is None:
            is_whole = self._kind == "arguments" and self._scan.done
            held = 0 if self._ended and not is_whole else held_chars(self._rest, marks)
            self._emit_body(self._consume(len(self._rest) - held))
            if self._ended:
                self._end_body(is_cut=not (self._scan.done or self._scan.broken))
            return self._ended
        self._emit_body(self._consume(found.start()))
        if found[0] in ENDS:
            self._consume(len(found[0]))
        self._end_body()
        return True

    def _emit_body(self, text: str) -> None:
        if not text:
            return
        if self._kind == "reasoning" and not self._has_text and self._has_reasoning:
            self._emit("reasoning", "\n")
        self._has_text = True
        self._has_reasoning = self._has_reasoning or self._kind == "reasoning"
        self._emit(self._kind, text)

    def _end_body(self, *, is_cut: bool = False) -> None:
        if self._kind == "arguments":
            if not self._has_text:
                self._emit("arguments", "{}")
            self._end_call("cut" if is_cut and self._has_text else "end")
        self._state = self._between
