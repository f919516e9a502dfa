# SPDX-License-Identifier: Apache-2.0
"""Structural tags: `structures` with `triggers`, and the newer `format`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .rules import Tag, TagRules

MAX_ENTRIES = 256
MAX_ALL_ENTRIES = 1024
"""Limit of elements, tags and ends."""
TYPES = (
    *("const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or", "tag"),
    *("triggered_tags", "tags_with_separator"),
)
_INNER = {"json_schema": ("json", "json_schema"), "regex": ("regex", "pattern"), "grammar": ("grammar",) * 2}
"""Type -> kind of grammar, and field."""
_FIELDS = {
    "const_string": {"value"},
    "any_text": set[str](),
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    **{kind: {field} for kind, (_, field) in _INNER.items()},
}


def add_structural_tag(given: Any, rules: TagRules) -> str:
    """The start of rules for an object, or its JSON text.  Raises ValueError."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"structural_tag is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(given, dict):
        raise ValueError(f"structural_tag is a {type(given).__name__}; send an object")
    if unknown := given.keys() - {"type", "format", "structures", "triggers"}:
        raise ValueError(f"{min(unknown)[:64]!r} is not a field of structural_tag; leave it out")
    if "format" in given:
        if given.keys() & {"structures", "triggers"}:
            raise ValueError("structural_tag has format beside structures; send one of them")
        return _expression(given["format"], rules, is_last=True)
    tags = [_structure(one, rules) for one in _list_of(given, "structures")]
    return rules.triggered(tags, _triggers(given))


def _structure(given: Any, rules: TagRules) -> Tag:
    if not isinstance(given, dict) or given.keys() - {"begin", "schema", "end"}:
        raise ValueError('a structure must be {"begin": TEXT, "schema": {...}, "end": TEXT}')
    schema = given.get("schema")
    return Tag(
        _text(given, "begin"), rules.within("json", {} if schema is None else schema), _text(given, "end")
    )


def _expression(given: Any, rules: TagRules, *, is_last: bool) -> str:
    """Rules of a format.  is_last: free text may end the answer."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in TYPES:
        raise ValueError(
            f"format: the type {str(kind)[:64]!r} is not supported; allowed are {', '.join(TYPES)}"
        )
    if kind != "tag":
        _add_entries(1, rules)
    for name, value in given.items():
        if name not in _FIELDS[kind] | {"type"} and value not in (None, False, [], ""):
            raise ValueError(f"format: {name[:64]!r} of {kind} is not supported; leave it out")
    if kind == "const_string":
        return rules.literal(_text(given, "value")) or '""'
    if kind in _INNER:
        name, field = _INNER[kind]
        if field not in given:
            raise ValueError(f"format: {kind} has no {field}; send it")
        return rules.within(name, given[field])
    if kind in ("sequence", "or"):
        return _elements(given, rules, is_last=is_last)
    if kind == "tag":
        return _options(_tag(given, rules), rules)
    if kind == "tags_with_separator":
        return _separated(given, rules)
    if not is_last:
        raise ValueError(f"format: {kind} is supported at the end of the answer, or any_text within a tag")
    if kind == "any_text":
        return rules.free()
    tags = [one for tag in _list_of(given, "tags") for one in _tag(tag, rules)]
    starts, once = given.get("at_least_one") is True, given.get("stop_after_first") is True
    return rules.triggered(tags, _triggers(given), starts=starts, once=once)


def _elements(given: Mapping[str, Any], rules: TagRules, *, is_last: bool) -> str:
    elements = _list_of(given, "elements")
    if given["type"] == "or":
        found = [rules.rule(_expression(one, rules, is_last=is_last)) for one in elements]
        return f"({' | '.join(found)})"
    last = len(elements) - 1
    parts = (_expression(one, rules, is_last=is_last and place == last) for place, one in enumerate(elements))
    return " ".join(f"({one})" for one in parts)


def _tag(given: Any, rules: TagRules) -> list[Tag]:
    """The tag, once for each end."""
    if not isinstance(given, dict) or given.get("type", "tag") != "tag":
        raise ValueError('a tag must be {"type": "tag", "begin": TEXT, "content": {...}, "end": TEXT}')
    if unknown := given.keys() - _FIELDS["tag"] - {"type"}:
        raise ValueError(f"format: {min(unknown)[:64]!r} of tag is not supported; leave it out")
    begin, content, ends = _text(given, "begin"), given.get("content"), given.get("end")
    listed = ends if isinstance(ends, list) else [ends]
    _add_entries(len(listed), rules)
    is_free = isinstance(content, dict) and content.get("type") == "any_text"
    inner = None if is_free else rules.rule(_expression(content, rules, is_last=False))
    if not listed or (is_free and len(listed) > 1):
        raise ValueError("format: a tag with any_text needs one end; send a text")
    return [Tag(begin, inner, _text({"end": end}, "end")) for end in listed]


def _options(tags: list[Tag], rules: TagRules) -> str:
    return f"({' | '.join(rules.whole(tag) for tag in tags)})"


def _separated(given: Mapping[str, Any], rules: TagRules) -> str:
    tags = _options([one for tag in _list_of(given, "tags") for one in _tag(tag, rules)], rules)
    found = tags
    if given.get("stop_after_first") is not True:
        found = f"{tags} ({rules.literal(_text(given, 'separator'))} {tags})*"
    return f"({found})" if given.get("at_least_one") is True else f"({found})?"


def _triggers(given: Mapping[str, Any]) -> list[str]:
    found = _list_of(given, "triggers")
    if not all(isinstance(one, str) for one in found):
        raise ValueError("triggers must be a list of texts")
    return list(dict.fromkeys(found))


def _add_entries(num: int, rules: TagRules) -> None:
    rules.num_entries += num
    if rules.num_entries > MAX_ALL_ENTRIES:
        raise ValueError(
            f"structural_tag has more than {MAX_ALL_ENTRIES} elements, tags and ends in all; send fewer"
        )


def _list_of(given: Mapping[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_ENTRIES:
        raise ValueError(f"structural_tag: {name} must be a list of 1 to {MAX_ENTRIES} entries")
    return found


def _text(given: Mapping[str, Any], name: str) -> str:
    found = given.get(name)
    if not isinstance(found, str):
        raise ValueError(f"structural_tag: {name} must be a text")
    return found
