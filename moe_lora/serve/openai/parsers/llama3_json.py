# SPDX-License-Identifier: Apache-2.0
"""Llama 3: {"name": …, "parameters": {…}}, perhaps after <|python_tag|>, separated by semicolons.

An object without a tool's name is content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .json_calls import OBJECT, JsonCalls
from .machine import MAX_GAP_CHARS, MAX_HEADER_CHARS

TAG = "<|python_tag|>"
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_KEYS = {"name", "type", "function", "id", "arguments", "parameters"}


class Llama3Calls(JsonCalls):
    OPEN = (TAG,)
    GAP = ""
    HEADER = re.compile(OBJECT, re.DOTALL)
    OUTER = True
    LEADS, TRIGGERS = True, ("{",)
    SHAPES = (('{"name": "NAME", "parameters": ', "}"),)

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._state = self._between

    def _between(self) -> bool:
        """Before an object: white space, semicolons, the tag."""
        gap = self._gap_chars("; \t\r\n" if self._had_call else " \t\r\n")
        rest = self._rest[gap : gap + len(TAG)]
        if not self._ended and TAG.startswith(rest) and rest != TAG and gap <= MAX_GAP_CHARS:
            return False
        if not rest and self._had_call and gap <= MAX_GAP_CHARS:
            self._rest = ""
        if not rest.startswith((TAG, "{")):
            self._state = self._content
            return True
        self._source = []
        self._consume(gap + (len(TAG) if rest == TAG else 0))
        self._state = self._header
        return True

    def _header(self) -> bool:
        key = _FIRST_KEY.match(self._rest, 0, MAX_HEADER_CHARS)
        gap = self._gap_chars()
        is_object = gap <= MAX_GAP_CHARS and self._rest[gap : gap + 1] in ("{", "")
        if not is_object or (key is not None and key[1] not in _KEYS):
            self._reject()
            return True
        return super()._header()

    def _name(self, found: re.Match[str]) -> str | None:
        name = super()._name(found)
        return name if name is not None and self._is_known(name) else None

    def _is_known(self, name: str) -> bool:
        return name in self._tools

    def _complete(self, text: str) -> bool:
        return self._ended and super()._complete(text)

    def _close(self) -> bool:
        self._end_call()
        self._state = self._between
        return True
