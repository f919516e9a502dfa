# SPDX-License-Identifier: Apache-2.0
"""Calls with a tag around each argument; the schema gives types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from .machine import MAX_GAP_CHARS, MAX_HEADER_CHARS, MAX_HELD_CHARS, Parser, held_chars

STRING = frozenset({"string"})
ANY: frozenset[str] = frozenset()
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words for JSON's."""


class TaggedCalls(Parser):
    """HEADER: from the opening mark to the first argument; its group is the name.

    KEY: opening mark of an argument.  ARGUMENT: from KEY to the value; its group is the argument's name.
    VALUE_END: mark after a value.  FINISH: marks after the last argument.  TRIM: a line end lies on both
    sides of a value.  NEXT: the text after VALUE_END; otherwise the mark is part of the value.  EARLY: marks
    that end a value without VALUE_END.  ARGUMENT_SHAPE, VALUE_SHAPE: as SHAPES, around an argument's name and
    after its value.
    """

    HEADER: ClassVar[re.Pattern[str]]
    KEY: ClassVar[str]
    ARGUMENT: ClassVar[re.Pattern[str]]
    VALUE_END: ClassVar[str]
    FINISH: ClassVar[tuple[str, ...]]
    TRIM: ClassVar[bool] = False
    NEXT: ClassVar[tuple[str, ...]] = ("",)
    EARLY: ClassVar[tuple[str, ...]] = ()
    ARGUMENT_SHAPE: ClassVar[tuple[str, str]]
    VALUE_SHAPE: ClassVar[str]

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._schema: Any = None
        self._separator = ""
        self._types = STRING
        self._held: list[str] = []
        """Pieces of a value, and their length."""
        self._num_held = 0

    def _header(self) -> bool:
        close = self._rest.find(self.CLOSE, 0, MAX_HEADER_CHARS + len(self.CLOSE))
        most = MAX_HEADER_CHARS if close < 0 else min(MAX_HEADER_CHARS, close + len(self.CLOSE))
        found = self.HEADER.match(self._rest, 0, most)
        if found is None:
            if close < 0 and len(self._rest) <= MAX_HEADER_CHARS and not self._ended:
                return False
            self._reject()
            return True
        self._consume(found.end())
        self._schema, self._separator = self._tools.get(found[1]), ""
        self._start_call(found[1])
        self._emit("arguments", "{")
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """Between two arguments."""
        gap = self._gap_chars()
        found = None if gap > MAX_GAP_CHARS else self.ARGUMENT.match(self._rest, 0, MAX_HEADER_CHARS)
        if found is not None:
            self._consume(found.end())
            self._types = types_of(self._schema, found[1])
            self._emit("arguments", f"{self._separator}{json.dumps(found[1], ensure_ascii=False)}: ")
            self._separator, self._state = ", ", self._value
            return True
        marks = self.KEY, *self.FINISH
        rest = self._rest[gap : gap + max(map(len, marks))]
        finish = next((mark for mark in self.FINISH if rest.startswith(mark)), None)
        if finish is not None and gap <= MAX_GAP_CHARS:
            self._emit("arguments", "}")
            self._consume(gap + (len(finish) if finish != self.CLOSE else 0))
            self._state = self._close
            return True
        may_follow = rest.startswith(self.KEY) and len(self._rest) <= MAX_HEADER_CHARS
        may_follow = may_follow or any(one.startswith(rest) for one in marks)
        if not self._ended and may_follow and gap <= MAX_GAP_CHARS:
            return False
        self._end_call()
        return True

    def _value(self) -> bool:
        """The start of a value."""
        if not self._rest and not self._ended:
            return False
        if self.TRIM and self._rest.startswith("\n"):
            self._consume(1)
        if self._types == STRING:
            self._emit("arguments", '"')
            self._state = self._string
        else:
            self._held, self._num_held = [], 0
            self._state = self._other
        return True

    def _string(self) -> bool:
        """A string, passed on in pieces."""
        end, is_whole = self._value_end()
        if is_whole:
            self._emit("arguments", _escaped(self._read_value(end)) + '"')
            return True
        self._emit("arguments", _escaped(self._read_start(end)))
        if self._ended:
            self._end_call()
        return self._ended

    def _other(self) -> bool:
        """A typed value, passed on whole; a too long value is a string."""
        end, is_whole = self._value_end()
        if is_whole:
            text = "".join((*self._held, self._read_value(end)))
            is_long = len(text) > MAX_HELD_CHARS
            self._emit("arguments", f'"{_escaped(text)}"' if is_long else as_json(text, self._types))
            return True
        self._held.append(self._read_start(end))
        self._num_held += len(self._held[-1])
        if self._ended:
            self._end_call()
        elif self._num_held > MAX_HELD_CHARS:
            self._emit("arguments", '"' + _escaped("".join(self._held)))
            self._state = self._string
            return True
        return self._ended

    def _read_start(self, end: int) -> str:
        """The certain part of a value, without a final line end."""
        if self._ended:
            return self._consume(len(self._rest))
        return self._consume(end - (self.TRIM and self._rest[:end].endswith("\n")))

    def _value_end(self) -> tuple[int, bool]:
        """The value's end and True, or its certain part's and False."""
        rest = self._rest
        marks = (self.VALUE_END, *self.EARLY)
        most = max(map(len, self.NEXT))
        for found in re.compile("|".join(map(re.escape, marks))).finditer(rest):
            if found[0] != self.VALUE_END:
                return found.start(), True
            after = rest[found.end() : found.end() + MAX_GAP_CHARS + most].lstrip()
            if after.startswith(self.NEXT):
                return found.start(), True
            may_follow = any(one.startswith(after) for one in self.NEXT)
            if may_follow and len(rest) < found.end() + MAX_GAP_CHARS + most:
                return found.start(), False
        return len(rest) - held_chars(rest, marks), False

    def _read_value(self, end: int) -> str:
        text = self._consume(end)
        if self._rest.startswith(self.VALUE_END):
            self._consume(len(self.VALUE_END))
        self._state = self._argument
        return text.removesuffix("\n") if self.TRIM else text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def types_of(schema: Any, name: str) -> frozenset[str]:
    """JSON types of an argument: `ANY` without a statement, string outside the schema."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or name not in properties:
        return STRING
    return _types(properties[name])


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, dict):
        return ANY
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(one for one in stated if isinstance(one, str))
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset(map(_type_of, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            found = [_types(option) for option in options]
            return frozenset().union(*found) if all(found) else ANY
    return ANY


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _no_constant(word: str) -> None:
    raise ValueError(word)


def as_json(text: str, types: frozenset[str]) -> str:
    """The value as JSON if a type allows, else a string."""
    value = text.strip()
    value = _WORDS.get(value, value)
    try:
        found = _type_of(json.loads(value, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = not types or found in types or (found == "integer" and "number" in types)
    return json.dumps(text, ensure_ascii=False) if not fits and "string" in types else value
