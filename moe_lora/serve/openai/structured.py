# SPDX-License-Identifier: Apache-2.0
"""Grammars of request bodies: response_format, structured_outputs, names of other servers, forced calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_lora.core.request import SamplingParams
from moe_lora.serve.http_errors import ApiError, bad_request

from .protocol import ChatRequest

if TYPE_CHECKING:
    from .protocol import SamplingFields

KINDS = ("json", "regex", "choice", "grammar", "json_object")
ALIASES = {
    **{f"guided_{kind}": kind for kind in KINDS},
    **{"json_schema": "json", "regex": "regex", "ebnf": "grammar"},
}
"""Field -> kind: vLLM's older names, then SGLang's."""
FORMATS = ("text", "json_object", "json_schema")
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "structural_tag")


class Asked(NamedTuple):
    """A grammar that a body asks for."""

    field: str
    kind: str
    value: Any


def asked_grammar(body: SamplingFields, *, has_tokenizer: bool) -> Asked | None:
    """Raises ApiError for two grammars, or for a grammar without a tokenizer."""
    asked = _asked(body)
    if not asked:
        return None
    if len(asked) > 1:
        first, second = (one.field for one in asked[:2])
        raise bad_request(f"{first} and {second} both give a grammar; send one of them", second)
    field = asked[0].field
    if not has_tokenizer:
        raise bad_request(f"{field} needs a tokenizer, but the model's directory has none", field)
    return asked[0]


def with_grammar(asked: Asked, sampling: SamplingParams) -> SamplingParams:
    """The parameters with the grammar, compiled once as a check.  Raises ApiError for the field."""
    from moe_lora.engine.text import grammars

    field, kind, value = asked
    try:
        grammar = _grammar(kind, value)
        grammars.check_grammar(grammar)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{field}: {error}", field) from error
    return replace(sampling, grammar=grammar)


def _asked(body: SamplingFields) -> list[Asked]:
    found = [(name, kind, getattr(body, name, None)) for name, kind in ALIASES.items()]
    if body.response_format is not None:
        found.append(("response_format", *_of_format(body.response_format)))
    if body.structured_outputs is not None:
        found += _of_outputs(body.structured_outputs)
    if isinstance(body, ChatRequest) and body.tools:
        from .parsers.forced import schema_of_calls

        calls = schema_of_calls(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
        found.append(("tool_choice", "json", calls))
    return [Asked(*one) for one in found if one[2] not in (None, "", [], False)]


def _of_format(given: Mapping[str, Any]) -> tuple[str, Any]:
    kind = given.get("type")
    if kind not in FORMATS:
        what = (
            f"response_format: the type {str(kind)[:64]!r} is not supported; allowed are {', '.join(FORMATS)}"
        )
        raise bad_request(what, "response_format")
    if kind != "json_schema":
        return "json_object", kind == "json_object"
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        what = 'response_format: json_schema must be {"name": ..., "schema": {...}}'
        raise bad_request(what, "response_format")
    return "json", schema


def _of_outputs(given: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    for name, value in given.items():
        if name in _OPTIONS and value not in (None, False):
            raise _refused(f"{name} is not supported; leave it out")
        if name not in (*KINDS, *_OPTIONS, "disable_fallback"):
            raise _refused(f"{name[:64]!r} is unknown; allowed are {', '.join(KINDS)}")
    found = [("structured_outputs", kind, given.get(kind)) for kind in KINDS]
    if all(value in (None, "", [], False) for _, _, value in found):
        raise _refused(f"no grammar is given; give one of {', '.join(KINDS)}")
    return found


def _refused(what: str) -> ApiError:
    return bad_request(f"structured_outputs: {what}", "structured_outputs")


def _grammar(kind: str, value: Any) -> str:
    """Raises ValueError."""
    from moe_lora.engine.text import grammars

    if kind == "json_object":
        if value is not True:
            raise ValueError(f"json_object is {str(value)[:64]}; send true or leave it out")
        return grammars.json_grammar({"type": "object"})
    if kind == "json":
        return grammars.json_grammar(value)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise ValueError("choice must be a list of non-empty texts")
        return grammars.choice_grammar(value)
    if not isinstance(value, str):
        raise ValueError(f"{kind} must be a text, not {json.dumps(value)[:64]}")
    return grammars.regex_grammar(value) if kind == "regex" else grammars.text_grammar(value)
