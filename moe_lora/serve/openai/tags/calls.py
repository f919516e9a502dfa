# SPDX-License-Identifier: Apache-2.0
"""Calls in a model's format: of strict functions, beside a format, and GPT-OSS's forced calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..parsers import parser_class
from ..parsers.choice import HARMONY, AnswerParsers
from ..parsers.harmony import MESSAGE
from ..parsers.tagged_calls import STRING, target, types_of
from ..parsers.thinking import REASONING_FORMATS
from .rules import Tag, TagRules

_INDEX = "INDEX"
_NOTES = {"type", "title", "description", "default", "examples", "enum", "const"}
_FORMS = ("$ref", "allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_ROOT = {
    *("type", "properties", "required", "additionalProperties", "title", "description", "$schema"),
    *_DEFINITIONS,
}


def add_strict_calls(given: Any, rules: TagRules) -> str:
    """The start of rules for an answer with strict functions.

    given: fields of `AnswerParsers`, and the functions.  Other calls have any JSON object.  Raises ValueError
    for a wrong schema.
    """
    fields, functions = given
    parsers = AnswerParsers(**fields)
    kind = parser_class(parsers.tool_format)
    tags = [tag for function in _free(functions) for tag in _tags(kind, function, rules)]
    if kind.LEADS:
        answer = rules.rule(_leading(kind, tags, rules))
    else:
        answer = rules.rule(rules.triggered(tags, kind.TRIGGERS or kind.OPEN))
    if parsers.is_closed or parsers.reasoning in ("", HARMONY):
        return answer
    opening, closing = REASONING_FORMATS[parsers.reasoning][:2]
    thought = f"({rules.until(closing)} {answer} | {rules.free((closing,))})"
    return thought if parsers.is_open else f"{rules.opened(opening)} {thought} | {answer}"


def add_calls_or_format(given: Any, rules: TagRules) -> str:
    """The start of rules for an answer that begins with a call, or is in a format.

    given: as of `add_strict_calls`, and kind and value of the format.
    """
    fields, functions, (form, value) = given
    kind, answer = parser_class(fields["tool_format"]), rules.within(form, value)
    if fields["tool_format"] == HARMONY:
        final = rules.literal(f"<|channel|>final{MESSAGE}")
        return f"{add_forced_call([_free(functions)], rules)} | {final} {answer}"
    if kind.LEADS:  # a lazy brace of a call excludes an object of the format
        call = rules.rule(" | ".join(rules.within("call", one) for one in _free(functions)))
        return f"({rules.opened(kind.OPEN[0])})? {call} (/\\s*;\\s*/ {call})* | {answer}"
    tags = [tag for function in _free(functions) for tag in _tags(kind, function, rules)]
    call, gap = rules.rule(" | ".join(map(rules.whole, tags))), "/\\s*/"
    marks = [rules.literal(one) for one in kind.NOISE]
    opening, closing = (f"({marks[0]} {gap})?", f"({gap} {marks[1]})?") if marks else ("", "")
    return f"{opening} {call} ({gap} {call})* {closing} | {answer}"


def _free(functions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The functions, with any object for arguments that are not strict."""
    return [{**one, **({} if one["strict"] is True else {"parameters": None})} for one in functions]


def add_forced_call(given: Any, rules: TagRules) -> str:
    """The start of rules for a call in harmony's commentary."""
    kind = parser_class(HARMONY)
    tags = [next(iter(_tags(kind, function, rules))) for function in given[0]]
    channel = rules.literal("<|channel|>commentary ")
    calls = (f"{rules.literal(tag.begin)} {tag.content} ({rules.literal(tag.end)})?" for tag in tags)
    return f"{channel} ({' | '.join(calls)})"


def _leading(kind: Any, tags: Iterable[Tag], rules: TagRules) -> str:
    """Calls at the answer's start, perhaps after a mark."""
    [brace] = kind.TRIGGERS
    rests = (f"{rules.literal(tag.begin[1:])} {tag.content} {rules.literal(tag.end)}" for tag in tags)
    call = rules.rule(" | ".join(rests))
    first = rules.rule(f"/\\s*/ {json.dumps(brace)}", "[lazy]")
    marked = f"{rules.opened(kind.OPEN[0])} {first}"
    between = f"/\\s*;\\s*/ ({rules.literal(kind.OPEN[0])})? {json.dumps(brace)}"
    return f"({first} | {marked}) {call} ({between} {call})* | {rules.free(kind.OPEN)}"


def _tags(kind: Any, function: Mapping[str, Any], rules: TagRules) -> Iterable[Tag]:
    """The format's forms of a call."""
    name = function["name"]
    quoted = json.dumps(name, ensure_ascii=False)
    if hasattr(kind, "ARGUMENT_SHAPE"):
        arguments = rules.rule(_tagged_arguments(kind, function, rules))
    else:
        arguments = rules.within("arguments", dict(function))
    for before, after in kind.SHAPES:
        head, index, tail = before.partition(_INDEX)
        head = head.replace('"NAME"', quoted) if '"NAME"' in head else head.replace("NAME", name)
        content = rules.rule(f"/[0-9]+/ {rules.literal(tail)} {arguments}") if index else arguments
        yield Tag(head, content, after, is_open=MESSAGE in before)


def _tagged_arguments(kind: Any, function: Mapping[str, Any], rules: TagRules) -> str:
    """A rule of tagged arguments, in the schema's order.

    Raises ValueError for a text with a further keyword.
    """
    schema = function["parameters"]
    if not schema:
        key = rules.rule('/[^<>"\\s]+/')
        return f"({_around(kind, key, _any_text(kind, rules), rules)})*"
    if more := schema.keys() - _ROOT:
        what = f"{min(more)} has no effect in tags; leave it out, or strict"
        raise ValueError(f"function {function['name']!r}: {what}")
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    are_texts = isinstance(required, list) and all(isinstance(one, str) for one in required)
    if not isinstance(properties, dict) or not are_texts:
        what = "properties must be an object, and required a list of texts"
        raise ValueError(f"function {function['name']!r}: {what}")
    names = [*properties, *(name for name in required if name not in properties)]
    parts = []
    for name in names:
        try:
            value = _value(kind, schema, name, properties.get(name, True), rules)
        except ValueError as error:
            raise ValueError(f"function {function['name']!r}: {error}") from error
        part = _around(kind, rules.literal(name), value, rules)
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts) or '""'


def _around(kind: Any, key: str, value: str, rules: TagRules) -> str:
    before, after = kind.ARGUMENT_SHAPE
    return f'{rules.literal(before)} {key} {rules.literal(after)} {value} "\\n"'


def _value(kind: Any, schema: Mapping[str, Any], name: str, given: Any, rules: TagRules) -> str:
    """A value and its end."""
    if not isinstance(given, dict | bool):
        raise ValueError(f"the schema of {name!r} is {json.dumps(given)[:64]}; send an object")
    end = rules.literal(kind.VALUE_SHAPE)
    if isinstance(given, bool) or types_of(schema, name) != STRING:
        shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
        inner = given if isinstance(given, bool) else {**given, **shared}
        return f"{rules.within('json', inner)} {end}"
    values = _texts(given, schema, name)
    if values is None:
        return _any_text(kind, rules)
    return f"({' | '.join(rules.literal(one) or json.dumps('') for one in values)}) {end}"


def _texts(given: Any, schema: Mapping[str, Any], name: str) -> list[str] | None:
    """The values of a text and its options, or None for any.  Raises ValueError for a further keyword."""
    found: dict[str, None] = {}
    is_any, seen, waiting = False, set[int](), [given]
    for one in waiting:  # a schema may be an option of itself
        if id(one) in seen:
            continue
        seen.add(id(one))
        keys = one.keys() if isinstance(one, dict) else {"an option"}
        form = next((key for key in _FORMS if key in keys), "")
        more = keys - ({form, *_NOTES} - {"enum", "const"} if form else _NOTES)
        options = [target(one, schema)] if form == "$ref" else one[form] if form else []
        if form and (not isinstance(options, list) or not options or (options[1:] and form == "allOf")):
            more = {form}
        if more:
            raise ValueError(
                f"{min(more)} of the text {name!r} has no effect in tags; leave it out, or strict"
            )
        values = [one["const"]] if "const" in one else one.get("enum")
        if one.get("type", "string") not in ("string", ["string"]):
            values = []
        if form or values is None:
            waiting += options
            is_any = is_any or not form
        elif isinstance(values, list) and values and all(isinstance(text, str) for text in values):
            found.update(dict.fromkeys(values))
        else:
            raise ValueError(f"the values of the text {name!r} must be texts")
    return None if is_any else list(found) or None


def _any_text(kind: Any, rules: TagRules) -> str:
    """Any text and its end, without early marks."""
    return rules.until(kind.VALUE_SHAPE, without=[mark for mark in kind.NEXT if mark])
