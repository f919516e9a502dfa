# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of functions within the schema of all calls.

References become pointers from the root: two functions may have equal `$id`s and anchors.  Data stays, "$ref"
in an enum too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from moe_lora.engine.text import grammars

from .tagged_calls import at_pointer

_ONE = {
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
}
_LISTED = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_NAMED = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
_DATA = {"const", "default"}


def grammar_of_calls(functions: list[dict[str, Any]], several: bool) -> str:
    """Grammar of a list of calls.  Raises ValueError with a wrong schema's function."""
    calls = [_schema_of_call(function, f"/items/anyOf/{place}") for place, function in enumerate(functions)]
    most = {} if several else {"maxItems": 1}
    schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
    return grammars.json_grammar(schema, lenient=True)


def grammar_of_arguments(function: Mapping[str, Any], *, is_call: bool = False) -> str:
    """Grammar of a function's arguments, or of its call with `parameters`.  Raises ValueError."""
    schema = _schema_of_call(function, "", "parameters") if is_call else _arguments(function, "")
    return grammars.json_grammar(schema, lenient=True)


def _schema_of_call(function: Mapping[str, Any], path: str, name: str = "arguments") -> dict[str, Any]:
    arguments = _arguments(function, f"{path}/properties/{name}")
    properties = {"name": {"const": function["name"]}, name: arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _arguments(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The schema of a function's arguments here."""
    name, given = function["name"], function.get("parameters") or {}
    kinds = given.get("type") or "object"
    try:
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError(f'the type of parameters is {json.dumps(kinds)[:64]}; send "object"')
        given = {**given, "type": "object"}
        if function.get("strict") is True:
            grammars.check_grammar(grammars.json_grammar(PlacedSchema(given, "", lenient=False).schema))
        return PlacedSchema(given, path, lenient=function.get("strict") is not True).schema
    except ValueError as error:
        raise ValueError(f"function {name!r}: {error}") from error


class PlacedSchema:
    """A copy of the schema, for this pointer of the root.

    lenient: drops keywords without an effect.  Raises ValueError for a reference without a target.
    """

    def __init__(self, given: Mapping[str, Any], place: str, *, lenient: bool) -> None:
        self.schema: dict[str, Any] = json.loads(json.dumps(given))
        self._place, self._lenient = place, lenient
        dialect = str(given.get("$schema"))
        self._is_old = any(f"/draft-0{number}/" in dialect for number in (3, 4, 6, 7))
        self._id_key = "id" if "/draft-03/" in dialect or "/draft-04/" in dialect else "$id"
        self._pointers: dict[str, str] = {"": ""}
        """URI, perhaps with an anchor -> pointer."""
        self._places: dict[str, str] = {}
        """Pointer of a read schema -> its base URI."""
        self._references: list[tuple[dict[str, Any], str]] = []
        self._add("", self.schema, "")
        for schema, base in self._references:
            self._set_reference(schema, base)

    def _add(self, pointer: str, schema: dict[str, Any], base: str) -> None:
        """Read a schema and its subschemas."""
        waiting = [(pointer, schema, base)]
        while waiting:
            pointer, schema, base = waiting.pop()
            if pointer in self._places:
                continue
            base = self._places[pointer] = self._base(pointer, schema, base)
            if self._lenient:
                _leave_out(schema)
            if isinstance(schema.get("$ref"), str):
                self._references.append((schema, base))
            waiting += ((pointer + path, inner, base) for path, inner in _schemas_in(schema))

    def _base(self, pointer: str, schema: dict[str, Any], base: str) -> str:
        """The base URI within the schema; moves its names here."""
        given, _ = schema.pop(self._id_key, None), schema.pop("$schema", None)
        if isinstance(given, str) and not (self._is_old and "$ref" in schema):
            uri, fragment = _split(base, given)
            if fragment:
                self._pointers.setdefault(f"{uri}#{fragment}", pointer)
            else:
                base = uri
                self._pointers.setdefault(uri, pointer)
        anchor = schema.pop("$anchor", None)
        for name in (anchor, schema.get("$dynamicAnchor")):
            self._pointers.setdefault(f"{base}#{name}", pointer)
        return base

    def _set_reference(self, schema: dict[str, Any], base: str) -> None:
        given = schema["$ref"]
        uri, fragment = _split(base, given)
        start = self._pointers.get(uri)
        if start is None and self._lenient:
            del schema["$ref"]
            return
        fragment = unquote(fragment)
        is_pointer = not fragment or fragment.startswith("/")
        name = f"{uri}#{fragment}"
        pointer = self._pointers.get(name) if start is None or not is_pointer else start + fragment
        found = None if pointer is None else at_pointer(self.schema, pointer)
        if pointer is None or not isinstance(found, dict | bool):
            raise ValueError(
                f"$ref {given[:200]!r} has no target in the schema; add the target, or leave it out"
            )
        if isinstance(found, dict):
            self._add(pointer, found, self._base_around(pointer))
        schema["$ref"] = f"#{quote(self._place + pointer)}"

    def _base_around(self, pointer: str) -> str:
        while pointer not in self._places:
            pointer = pointer.rpartition("/")[0]
        return self._places[pointer]


def _schemas_in(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and schema of each direct subschema."""
    for key, value in schema.items():
        within: Iterator[tuple[Any, Any]] = iter(())
        if key in _NAMED and isinstance(value, dict):
            within = iter(value.items())
        elif key in _LISTED and isinstance(value, list):
            within = enumerate(value)
        elif key in _ONE and isinstance(value, dict):
            yield f"/{key}", value
        for name, inner in within:
            if isinstance(inner, dict):
                yield f"/{key}/{str(name).replace('~', '~0').replace('/', '~1')}", inner


def _leave_out(schema: dict[str, Any]) -> None:
    """Remove null keywords, and patterns without a grammar."""
    for key in [key for key, value in schema.items() if value is None and key not in _DATA]:
        del schema[key]
    if isinstance(pattern := schema.get("pattern"), str) and not _compiles(pattern):
        del schema["pattern"]
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {one: inner for one, inner in patterns.items() if _compiles(one)}


def _compiles(pattern: str) -> bool:
    try:
        grammars.check_grammar(grammars.json_grammar({"type": "string", "pattern": pattern}))
    except ValueError:
        return False
    return True


def _split(base: str, given: str) -> tuple[str, str]:
    """URI and fragment of a reference.  A wrong URI stays whole."""
    if given.startswith("#"):
        return base, given[1:]
    try:
        uri, fragment = urldefrag(urljoin(base, given))
    except ValueError:
        return given, ""
    return uri, fragment
