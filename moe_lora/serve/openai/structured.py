# SPDX-License-Identifier: Apache-2.0
"""Grammars of request bodies."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from moe_lora.serve.http_errors import ApiError, bad_request

from .parsers import FORCED, parser_class

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer

    from .parsers.choice import AnswerParsers
    from .protocol import SamplingFields

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
PLAIN_KINDS = KINDS[:-1]
"""Kinds without tags: beside tools the answer is a call, or in the format."""
ALIASES = {
    **{f"guided_{kind}": kind for kind in KINDS},
    **{"json_schema": "json", "regex": "regex", "ebnf": "grammar"},
}
"""Field -> kind: vLLM's older names, then SGLang's."""
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
STRICT, EITHER = "strict_calls", "calls_or_format"
_END = "<|end|>"
_MARKS = re.compile(r"<\[[\d,]+\]>")
_GAP = "\ngap: /\\n{1,2}/"
MAX_CPU_S = 0.8
MAX_BYTES = 1 << 28
"""Memory that the child may add."""
_TOO_DEEP = "elements, tags and schemas lie too deep in each other; nest fewer"
_TOO_LARGE = (
    f"the grammar takes more than {MAX_CPU_S} s of processor time or {MAX_BYTES >> 20} MB to compile; "
    "use fewer alternatives and lower bounds of repetition"
)


class BodyGrammar(NamedTuple):
    """A body's grammar.  rules: Lark's, of the reasoning.

    marks: special tokens of answers with tags, and hidden tokens, or None.
    """

    field: str
    kind: str
    value: Any
    rules: str = ""
    marks: tuple[dict[str, int], list[str]] | None = None


def body_grammar(
    body: SamplingFields, tokenizer: Tokenizer | None, parsers: AnswerParsers | None
) -> BodyGrammar | None:
    """The body's grammar, or None.  Raises ApiError for two, or without a tokenizer."""
    asked = _asked(body)
    if not asked and parsers is not None and parsers.has_strict:
        asked = [BodyGrammar("tools", STRICT, None)]
    if not asked:
        return None
    if len(asked) > 1:
        first, second = (one.field for one in asked[:2])
        raise bad_request(f"{first} and {second} both give a grammar; send one of them", second)
    [one] = asked
    if tokenizer is None:
        raise bad_request(f"{one.field} needs a tokenizer, but this server has none", one.field)
    if parsers is not None and parsers.tool_format not in ("", FORCED) and one.kind in PLAIN_KINDS:
        kind = parser_class(parsers.tool_format)
        is_mixed = kind.LEADS and one.kind == "json_object" and parsers.has_strict  # a call is an object
        if is_mixed or not kind.SHAPES:
            tools = "strict tools" if is_mixed else "tools"
            what = f"{one.field} beside {tools} is not supported for the calls of {parsers.tool_format}"
            raise bad_request(f'{what}; leave one of them out, or send tool_choice="none"', one.field)
        one = one._replace(kind=EITHER, value=(one.kind, one.value))
    found = _with_marks(one, body, tokenizer, parsers)
    if parsers is None or not parsers.reasoning or one.kind == STRICT:
        return found
    return found._replace(rules=reasoning_rules(parsers, tokenizer, is_call=one.kind in ("calls", EITHER)))


def _with_marks(
    asked: BodyGrammar, body: SamplingFields, tokenizer: Tokenizer, parsers: AnswerParsers | None
) -> BodyGrammar:
    """Add the vocabulary's marks to tags."""
    is_listed = asked.kind == "calls" and (parsers is None or parsers.tool_format == FORCED)
    if is_listed or asked.kind not in (STRICT, EITHER, "structural_tag", "calls"):
        return asked
    from moe_lora.engine.text.grammars import mark_ids

    marks = mark_ids(tokenizer)
    if asked.kind not in (STRICT, EITHER):
        return asked._replace(marks=(marks, []))
    from .parsers.answers import hidden_ids

    chat = body.as_chat
    assert chat is not None
    assert parsers is not None
    names = "tool_format", "reasoning", "is_open", "is_closed"
    fields = {name: getattr(parsers, name) for name in names}
    unread = hidden_ids(tokenizer, parsers.marks())
    hidden = [mark for mark, token in marks.items() if token in unread]
    form = [asked.value] if asked.kind == EITHER else []
    return asked._replace(value=[fields, functions_of(chat.tools or []), *form], marks=(marks, hidden))


def _parts(asked: BodyGrammar) -> Callable[[], tuple[str, list[tuple[str, Any]]]]:
    """Makes the tags' Lark rules, or "", and the inner grammars.

    Imports here, before the fork.
    """
    kind, value, marks = asked.kind, asked.value, asked.marks
    if marks is None:
        return lambda: ("", [(kind, value)])
    from .tags.rules import TagRules

    if kind == "structural_tag":
        from .tags.structural import add_structural_tag as add
    elif kind == STRICT:
        from .tags.calls import add_strict_calls as add
    elif kind == EITHER:
        from .tags.calls import add_calls_or_format as add
    else:
        from .tags.calls import add_forced_call as add

    def make() -> tuple[str, list[tuple[str, Any]]]:
        rules = TagRules(*marks)
        return rules.lark(add(value, rules)), rules.inner

    return make


def outputs_of(body: SamplingFields) -> dict[str, Any] | None:
    """The body's grammar as structured_outputs, unless of forced calls."""
    return next(({one.kind: one.value} for one in _asked(body) if one.kind in KINDS), None)


def checked_grammar(asked: BodyGrammar) -> str:
    """The grammar's text, compiled as a check.  Raises ApiError.

    For a process of one thread only (`in_child`).
    """
    from moe_lora.engine.text import grammars

    parts = _parts(asked)

    def make() -> str:
        tags, inner = parts()
        made = {f"inner_{place}": _grammar(*one) for place, one in enumerate(inner)}

        def whole(shown: Callable[[str], str]) -> str:
            answer = grammars.composed(shown(tags), made) if tags else made["inner_0"]
            return grammars.after(shown(asked.rules), answer)

        # The check's vocabulary has one mark.
        grammars.check_grammar(whole(partial(_MARKS.sub, grammars.ANY_MARK)))
        return whole(str)

    try:
        return in_child(make)
    except ValueError as error:
        field = name = asked.field
        if asked.kind == EITHER:
            is_tool = str(error).startswith("function ")
            if not is_tool:
                checked_grammar(BodyGrammar(field, *asked.value[-1]))  # else the format alone is wrong
            field, name = "tools", "tools" if is_tool else f"{field} beside tools"
        raise bad_request(f"{name}: {error}", field) from error


def in_child(make: Callable[[], str]) -> str:
    """The grammar from `make`, in a fork: for a process of one thread only.

    Raises ValueError of `make`, and beyond the limits.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _make_and_exit(make, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        found = answer.read()
    _, status = os.waitpid(child, 0)
    if status or not found:
        raise ValueError(_TOO_LARGE)
    grammar, problem = json.loads(found)
    if problem is not None:
        raise ValueError(problem)
    return str(grammar)


def _make_and_exit(make: Callable[[], str], writer: int) -> NoReturn:
    try:
        _limit()
        found: tuple[str | None, str | None]
        try:
            found = make(), None
        except MemoryError:
            found = None, _TOO_LARGE
        except RecursionError:
            found = None, _TOO_DEEP
        except ValueError as error:
            found = None, str(error)
        with os.fdopen(writer, "wb") as answer:
            answer.write(json.dumps(found).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _limit() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # then its signal ends the process
    with suppress(OSError):
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))


def _asked(body: SamplingFields) -> list[BodyGrammar]:
    found = [(name, kind, getattr(body, name, None)) for name, kind in ALIASES.items()]
    if body.response_format is not None:
        found.append(("response_format", *_of_format(body.response_format)))
    if body.structured_outputs is not None:
        found.append(_of_outputs(body.structured_outputs))
    chat = body.as_chat
    if chat is not None and chat.tools:
        parallel = chat.parallel_tool_calls is not False
        found.append(
            ("tool_choice", "calls", forced_functions(chat.tools, chat.tool_choice, parallel=parallel))
        )
    return [BodyGrammar(*one) for one in found if one[2] not in (None, "", [], False)]


def _of_format(given: Mapping[str, Any]) -> tuple[str, Any]:
    kind = given.get("type")
    if kind not in FORMATS:
        what = (
            f"response_format: the type {str(kind)[:64]!r} is not supported; allowed are {', '.join(FORMATS)}"
        )
        raise bad_request(what, "response_format")
    if kind == "structural_tag":
        return "structural_tag", dict(given)
    if kind != "json_schema":
        return "json_object", kind == "json_object"
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        what = 'response_format: json_schema must be {"name": ..., "schema": {...}}'
        raise bad_request(what, "response_format")
    return "json", schema


def _of_outputs(given: Mapping[str, Any]) -> tuple[str, str, Any]:
    for name, value in given.items():
        if name in _OPTIONS and value not in (None, False):
            raise _refused(f"{name} is not supported; leave it out")
        if name not in (*KINDS, *_OPTIONS, "disable_fallback"):
            raise _refused(f"{name[:64]!r} is unknown; allowed are {', '.join(KINDS)}")
    found = [kind for kind in KINDS if given.get(kind) not in (None, "", [], False)]
    if len(found) > 1:
        raise _refused(f"{found[0]} and {found[1]} both give a grammar; send one of them")
    if not found:
        raise _refused(f"no grammar is given; give one of {', '.join(KINDS)}")
    return "structured_outputs", found[0], given[found[0]]


def _refused(what: str) -> ApiError:
    return bad_request(f"structured_outputs: {what}", "structured_outputs")


def _grammar(kind: str, value: Any) -> str:
    """Raises ValueError."""
    from moe_lora.engine.text import grammars

    if kind == "json_object":
        if value is not True:
            raise ValueError(f"json_object is {str(value)[:64]}; send true or leave it out")
        return grammars.json_grammar({"type": "object"})
    if kind == "calls":
        from .parsers.schemas import grammar_of_calls

        return grammar_of_calls(*value)
    if kind in ("arguments", "call"):
        from .parsers.schemas import grammar_of_arguments

        return grammar_of_arguments(value, is_call=kind == "call")
    if kind == "json":
        return grammars.json_grammar(value)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise ValueError("choice must be a list of non-empty texts")
        return grammars.choice_grammar(value)
    if not isinstance(value, str):
        raise ValueError(f"{kind} must be a text, not {json.dumps(value)[:64]}")
    return grammars.regex_grammar(value) if kind == "regex" else grammars.text_grammar(value)


def reasoning_rules(parsers: AnswerParsers, tokenizer: Tokenizer, *, is_call: bool = False) -> str:
    """Lark rules: `start` is the reasoning, then @answer.  "": the answer begins at once.

    is_call: of harmony, with a separate channel.
    """
    from .parsers.choice import HARMONY
    from .parsers.harmony import CHANNEL, MESSAGE, START
    from .parsers.thinking import REASONING_FORMATS

    if parsers.is_closed:
        return ""
    if parsers.reasoning == HARMONY:
        channel, message, start = (_mark(one, tokenizer) for one in (CHANNEL, MESSAGE, START))
        until, rule = _until(_END, tokenizer)
        analysis = f'analysis: {channel} "analysis" {message} {until} {start} "assistant"'
        final = "" if is_call else f'{channel} "final" {message}'
        return f"start: analysis* {final} @answer\n{analysis}\n{rule}"
    marks = REASONING_FORMATS[parsers.reasoning]
    until, rule = _until(marks.closing, tokenizer)
    if parsers.is_open:
        return f"start: {until} gap? @answer\n{rule}{_GAP}"
    return f"start: ({_mark(marks.opening, tokenizer)} {until} gap?)? @answer\n{rule}{_GAP}"


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """The mark as special token or text."""
    from moe_lora.engine.text.grammars import mark_ids

    token = mark_ids(tokenizer).get(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _until(closing: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Text up to a mark: the rule's use, and the rule."""
    mark, text = _mark(closing, tokenizer), "/(.|\\n)*/"
    if mark.startswith("<["):
        return f"thought {mark}", f"thought: {text}"
    return "thought", f"thought[stop={mark}]: {text}"


def forced_functions(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, *, parallel: bool
) -> tuple[list[dict[str, Any]], bool] | None:
    """Functions for the answer, and True for several calls; or None."""
    if choice in (None, "none", "auto"):
        return None
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    functions = [one for one in functions_of(tools) if wanted in (None, one["name"])]
    return functions, parallel and wanted is None


def functions_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of each function for a grammar."""
    return [{name: tool["function"].get(name) for name in ("name", "parameters", "strict")} for tool in tools]
