# SPDX-License-Identifier: Apache-2.0
"""Calls with a tag around each argument; the schema gives types."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import unquote

from .machine import MAX_GAP_CHARS, MAX_HEADER_CHARS, MAX_HELD_CHARS, Parser, held_chars

STRING = frozenset({"string"})
ANY: frozenset[str] = frozenset()
MAX_REFERENCES = 64
"""Steps from a schema to its keywords; a longer way has any type."""
_STATING = {"$ref", "allOf", "anyOf", "const", "enum", "oneOf", "type"}
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
        self._known: dict[str, frozenset[str]] = {}
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
        self._schema, self._separator, self._known = self._tools.get(found[1]), "", {}
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
            if found[1] not in self._known:
                self._known[found[1]] = types_of(self._schema, found[1])
            self._types = self._known[found[1]]
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
        may_follow = may_follow and gap <= MAX_GAP_CHARS
        if not self._ended and may_follow:
            return False
        self._end_call("cut" if may_follow else "end")
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
            self._end_call("cut")
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
            self._end_call("cut")
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
    found = resolved(schema, schema)
    properties = found.get("properties") if isinstance(found, dict) else None
    if not isinstance(properties, dict) or name not in properties:
        return STRING
    return _types(properties[name], schema)


def resolved(schema: Any, root: Any) -> Any:
    """The schema with the keywords of a local `$ref`, or of the only member of `allOf`."""
    seen = {id(schema)}
    while isinstance(schema, dict) and len(seen) <= MAX_REFERENCES:
        key, found = "$ref", target(schema, root)
        if found is None and isinstance(members := schema.get("allOf"), list) and len(members) == 1:
            key, found = "allOf", members[0]
        if not isinstance(found, dict) or id(found) in seen:
            break
        if len(seen) == 1:
            schema = schema.copy()
        seen.add(id(found))
        del schema[key]
        for name, value in found.items():
            schema.setdefault(name, value)
    return schema


def target(schema: dict[str, Any], root: Any) -> Any:
    """The target of a local `$ref`, or None."""
    pointer: Any = schema.get("$ref")
    is_local = isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))
    return at_pointer(root, unquote(pointer[1:])) if is_local else None


def at_pointer(schema: Any, pointer: str) -> Any:
    """The value at a pointer, or None."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(schema) else None
        else:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _types(schema: Any, root: Any) -> frozenset[str]:
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    for one in waiting:  # a schema may be an option of itself
        if id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, dict):
            return ANY
        stated, values = one.get("type"), [one["const"]] if "const" in one else one.get("enum")
        if isinstance(stated, str | list) and stated:
            found.update([stated] if isinstance(stated, str) else (n for n in stated if isinstance(n, str)))
        elif isinstance(values, list) and values:
            found.update(map(_type_of, values))
        elif options := _options(one):
            waiting += options
        else:
            waiting.append(target(one, root))
    return frozenset(found)


def _options(schema: dict[str, Any]) -> list[Any]:
    """Schemas that state the types of another; `allOf` also has members without types."""
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            return options
    members = schema.get("allOf")
    members = members if isinstance(members, list) else []
    return [one for one in members if isinstance(one, dict) and not _STATING.isdisjoint(one)]


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
        return json.dumps(_python_literal(value, types) or text, ensure_ascii=False)
    fits = not types or found in types or (found == "integer" and "number" in types)
    return json.dumps(text, ensure_ascii=False) if not fits and "string" in types else value


def _python_literal(text: str, types: frozenset[str]) -> Any:
    """A list or an object in Python's syntax, if a type allows and JSON can hold it; else None."""
    if types.isdisjoint({"array", "object"}) or not text.startswith(("[", "{")):
        return None
    try:
        with warnings.catch_warnings():  # of wrong escapes
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        is_json = json.loads(text.encode()) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if is_json and _type_of(value) in types else None
