# SPDX-License-Identifier: Apache-2.0
"""Calls with JSON arguments between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from .machine import MAX_GAP_CHARS, MAX_HEADER_CHARS, MAX_HELD_CHARS, JsonScan, Parser, is_object

OBJECT = (
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The start of an object, name first."""
_OBJECTS = re.compile(r"(?:\s*\[)?\s*\{")


class JsonCalls(Parser):
    """HEADER: from the opening mark to the arguments, with group `name` or `quoted`, and perhaps `id`.

    OUTER: an object holds the arguments.
    """

    HEADER: ClassVar[re.Pattern[str]]
    OUTER: ClassVar[bool] = False

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._scan = JsonScan()
        self._is_outer = self.OUTER
        self._num_before = self._num_held = 0
        """Characters before, and of, objects without a header."""

    def _header(self) -> bool:
        close = self._rest.find(self.CLOSE, 0, MAX_HEADER_CHARS) if self.CLOSE else -1
        most = MAX_HEADER_CHARS if close < 0 else close + len(self.CLOSE) - 1
        found = self.HEADER.match(self._rest, 0, most)
        name = None if found is None else self._name(found)
        if found is not None and name is not None:
            self._is_outer = self.OUTER or ("quoted" in found.groupdict() and bool(found["quoted"]))
            self._consume(found.end())
            self._start_call(name, found.groupdict().get("id") or "")
            self._scan, self._state = JsonScan(), self._arguments
            return True
        if found is None and close < 0 and not self._ended:
            if len(self._rest) < MAX_HEADER_CHARS:
                return False
            if _OBJECTS.match(self._rest, 0, MAX_HEADER_CHARS):
                self._scan, self._state = JsonScan(), self._objects
                self._num_before, self._num_held = len(self._source_text()), 0
                return True
            self._reject()
            return True
        if not self._complete(self._rest if close < 0 else self._rest[:close]):
            self._reject()
        return True

    def _objects(self) -> bool:
        """Objects without a header."""
        room = MAX_HELD_CHARS - self._num_held
        self._num_held += len(self._consume(self._scan.feed(self._rest[:room])))
        is_open = not (self._scan.done or self._scan.broken or self._ended)
        if is_open and self._num_held < MAX_HELD_CHARS:
            return False
        source = self._source_text()
        before, text = source[: self._num_before], source[self._num_before :]
        if not self._scan.done or not self._add_calls(text):
            self._source = [before]
            self._reject()
            self._read_again(text)
        return True

    def _name(self, found: re.Match[str]) -> str | None:
        """The call's name; None for invalid JSON."""
        groups = found.groupdict()
        if not groups.get("quoted"):
            return groups["name"].strip() or None
        try:
            return json.loads(groups["quoted"]) or None
        except ValueError:
            return None

    def _complete(self, text: str) -> bool:
        """Read whole objects, with keys in any order.  False: no calls."""
        if not self._add_calls(text):
            return False
        self._consume(len(text))
        return True

    def _add_calls(self, text: str) -> bool:
        """Start the calls of whole objects.  False: no calls."""
        calls = _calls_in(text) if _OBJECTS.match(text, 0, MAX_HEADER_CHARS) else []
        if not calls or not all(self._is_known(name) for name, _ in calls):
            return False
        for place, (name, arguments) in enumerate(calls):
            if place:  # the last call has the source
                self._emit("end", "")
            self._start_call(name)
            self._emit("arguments", arguments)
        self._is_outer, self._state = text.lstrip().startswith("{"), self._close
        return True

    def _is_known(self, name: str) -> bool:
        return True

    def _arguments(self) -> bool:
        self._emit("arguments", self._consume(self._scan.feed(self._rest)))
        if self._scan.broken:
            self._state = self._close
        elif self._scan.done:
            self._scan = JsonScan(depth=1)
            self._state = self._after if self._is_outer else self._close
        elif self._ended:
            self._end_call("cut")
        else:
            return False
        return True

    def _after(self) -> bool:
        """The rest of the outer object."""
        self._consume(self._scan.feed(self._rest))
        if self._scan.done or self._scan.broken:
            self._state = self._close
        elif self._ended:
            self._end_call("cut")
        else:
            return False
        return True


class ListedCalls(JsonCalls):
    """Objects of a list: one mark opens all."""

    def _close(self) -> bool:
        self._end_call()
        if self._is_outer:
            self._state = self._between
        return True

    def _between(self) -> bool:
        """After a listed object: a comma, or the end."""
        gap = self._gap_chars()
        if gap == len(self._rest) and not self._ended and gap <= MAX_GAP_CHARS:
            return False
        self._state = self._content
        if self._rest[gap : gap + 1] in {",", "]"}:
            self._source = []
            if self._consume(gap + 1)[-1] == ",":
                self._state = self._header
            else:
                self._source = None
        return True


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Names and arguments in JSON; empty for plain text and malformed calls."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not isinstance(name := one.get("name"), str) or not name:
            return []
        given = one.get("arguments", one.get("parameters", {}))
        arguments = (given or "{}") if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if not is_object(arguments):
            return []
        calls.append((name, arguments))
    return calls


class ForcedCalls(ListedCalls):
    """Forced calls: by grammar a list of {"name": …, "arguments": {…}}."""

    HEADER = re.compile(rf"(?:\s*\[)?{OBJECT}", re.DOTALL)

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._source, self._state = [], self._header
