# SPDX-License-Identifier: Apache-2.0
"""Each format of calls and reasoning through its parser: whole, and cut at every place."""

from __future__ import annotations

import json
import warnings
from enum import Enum
from itertools import product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from moe_lora.config.front_end import REASONING_PARSERS, TOOL_PARSERS
from moe_lora.serve.openai.parsers import TOOL_FORMATS, parser_class, tagged_calls
from moe_lora.serve.openai.parsers.answers import ParsedChoice
from moe_lora.serve.openai.parsers.choice import AnswerParsers
from moe_lora.serve.openai.parsers.machine import Kind, is_object
from moe_lora.serve.openai.parsers.tagged_calls import STRING, as_json, types_of
from moe_lora.serve.openai.parsers.thinking import REASONING_FORMATS
from tests.grids import diagonal, with_quick

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "wind": {"type": "boolean"},
            "at": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
FIRST = {"city": 'S\u00e3o "Paulo"\n{x}', "days": 3, "at": {"a": [1, {"b": "}]"}]}}
ARGUMENTS = json.dumps(FIRST, ensure_ascii=False)
CALLS = [("weather", FIRST), ("now", {})]
CITY = 'S\u00e3o "Paulo"\n{x}'
AT = '{"a": [1, {"b": "}]"}]}'
HERMES = '<tool_call>\n{{"name": "weather", "arguments": {0}}}\n</tool_call>\n<tool_call>\n{1}\n</tool_call>'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
HARMONY = (
    f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
    "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
)
CODER = (
    f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n"
    f"</parameter>\n<parameter=at>\n{AT}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=now>\n</function>\n</tool_call>"
)
GLM = (
    f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
    f"<arg_value>3</arg_value>\n<arg_key>at</arg_key>\n<arg_value>{AT}</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>"
)
MINIMAX = (
    f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
    f'<parameter name="days">3</parameter>\n<parameter name="at">{AT}</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
GEMMA = (
    '<|tool_call>call:weather{city:<|"|>CITY<|"|>,days:3, at:{a:[1,{b:<|"|>}]<|"|>}]}}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>"
).replace("CITY", CITY)
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
LLAMA_NOW = '{"name":"now","parameters":{}}'
OBJECT = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
NOW = '{"name": "now", "arguments": {}}'
FORMATS = [
    ("hermes", HERMES.format(ARGUMENTS, NOW)),
    ("hermes", HERMES.format(ARGUMENTS, '{"arguments": {}, "name": "now"}')),
    ("hermes", HERMES.format(ARGUMENTS, '{"name": "now"}')),
    ("qwen3_coder", CODER),
    ("llama3_json", f"{LLAMA}; {LLAMA_NOW}"),
    ("llama3_json", f'<|python_tag|>{{"type": "function", {LLAMA[1:]};{LLAMA_NOW}'),
    ("mistral", f"[TOOL_CALLS] [{OBJECT}, {NOW}]"),
    ("mistral", f'[TOOL_CALLS][{{"arguments": {ARGUMENTS}, "name": "weather"}}, {NOW}]'),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{{}}"),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]now{{}}"),
    ("harmony", HARMONY),
    ("glm4", GLM),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", DEEPSEEK_V31),
    ("kimi", KIMI),
    ("granite", f"<|tool_call|>[{OBJECT}, {NOW}]"),
    ("granite", f'<tool_call>[{{"arguments": {ARGUMENTS}, "name": "weather"}}, {NOW}]'),
    ("gemma4", GEMMA),
    ("minimax_m2", MINIMAX),
    ("minimax_m2", MINIMAX.replace('"weather"', "weather").replace('"city"', "'city'")),
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(FORMATS)]
MALFORMED = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"a": oops}}</tool_call> end',
    "qwen3_coder": "<tool_call><function=weather><parameter=city>x</parameter>junk</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"a": <}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"a": <',
    "harmony": "<|channel|>commentary to=functions.weather<|message|>{oops<|call|>",
    "glm4": "<tool_call>weather\n<arg_key>city</arg_key>junk</tool_call>",
    "deepseek_v3": "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{oops}<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{oops}<|tool_call_end|>",
    "granite": '<tool_call>[{"name": "weather", "arguments": {"a": <}}]',
    "gemma4": "<|tool_call>call:weather{city:}<tool_call|>",
    "minimax_m2": '<invoke name="weather"><parameter name="city">x</parameter>junk</invoke>',
}


def parsers(name, **options):
    return AnswerParsers(tool_format=name, tools=TOOLS, **options)


def streamed(found, pieces):
    """Content, reasoning, calls; the client's view after all deltas."""
    choice, content, reasoning, calls = ParsedChoice(found), "", "", {}
    for place, piece in enumerate(pieces):
        new = choice.read(piece, ended=place == len(pieces) - 1)
        content, reasoning = content + new.content, reasoning + new.reasoning
        for index, part in new.calls.items():
            call = calls.setdefault(index, ["", ""])
            call[0] += part["function"].get("name", "")
            call[1] += part["function"]["arguments"]
    return content, reasoning, [tuple(call) for _, call in sorted(calls.items())]


def whole(found, text):
    pieces, calls = ParsedChoice(found).whole(text)
    return pieces.content, pieces.reasoning, [(call.name, call.arguments) for call in calls]


def whole_at_limit(found, text):
    """As `whole`, of an answer that a limit ended."""
    pieces, calls = ParsedChoice(found).whole(text, at_limit=True)
    return pieces.content, pieces.reasoning, [(call.name, call.arguments) for call in calls]


def assert_same_for_all_cuts(found, text, step=1):
    expected = streamed(found, [text])
    assert streamed(found, [*text]) == expected
    for at in range(0, len(text), step):
        assert streamed(found, [text[:at], text[at:]]) == expected
    return expected


@pytest.mark.parametrize(("name", "text"), FORMATS, ids=IDS)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_format_gives_its_calls_however_it_is_cut(name, text, step):
    content, reasoning, calls = assert_same_for_all_cuts(parsers(name), text, step)
    assert (content, reasoning) == ("", "")
    assert [(called, json.loads(arguments)) for called, arguments in calls] == CALLS
    assert whole(parsers(name), text) == (content, reasoning, calls)


@pytest.mark.parametrize(("name", "text"), FORMATS, ids=IDS)
def test_text_before_calls_is_content(name, text):
    if name == "llama3_json":
        return
    before = "Let me look.\n\n"
    if name == "harmony":
        before = "<|channel|>final<|message|>Let me look.<|end|>"
    content, _, calls = assert_same_for_all_cuts(parsers(name), before + text, 5)
    assert content == (before if name == "kimi" else "Let me look.")
    assert [called for called, _ in calls] == ["weather", "now"]


@pytest.mark.parametrize(("name", "text"), FORMATS, ids=IDS)
def test_one_call_alone_where_calls_may_not_be_parallel(name, text):
    content, _, calls = assert_same_for_all_cuts(parsers(name, parallel=False), text, 5)
    assert content == ""
    assert [called for called, _ in calls] == ["weather"]
    assert whole(parsers(name, parallel=False), text)[2] == calls


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("text", ["", " ", "Hello.\n", '{"a": 1}', "<tool", "1 < 2", "[TOOL", "```json\n{}"])
def test_other_text_is_content(name, text):
    assert assert_same_for_all_cuts(parsers(name), text) == (text, "", [])
    assert whole(parsers(name), text) == (text, "", [])


@pytest.mark.parametrize(("name", "text"), MALFORMED.items())
def test_a_malformed_call_is_content(name, text):
    assert_same_for_all_cuts(parsers(name), text)
    content, _, calls = whole(parsers(name), text)
    assert calls == []
    assert content == text


@pytest.mark.parametrize(
    ("name", "opening", "closing"),
    [
        ("hermes", "<tool_call>", "</tool_call>"),
        ("mistral", "[TOOL_CALLS]", ""),
        ("granite", "<tool_call>", ""),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_list_of_arguments_first_with_a_malformed_call_is_content(name, opening, closing, is_first):
    """Neither is a call's text sent twice, nor is one lost."""
    good, malformed = '{"arguments": {}, "name": "now"}', '{"arguments": "Oslo", "name": "weather"}'
    listed = f"[{malformed}, {good}]" if is_first else f"[{good}, {malformed}]"
    text = f"{opening}{listed}{closing}"
    assert assert_same_for_all_cuts(parsers(name), text) == whole(parsers(name), text) == (text, "", [])


@pytest.mark.parametrize(("name", "text"), FORMATS, ids=IDS)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_call_cut_short_is_content_of_a_whole_answer(name, text, step):
    for end in range(0, len(text), step):
        cut = text[:end]
        _, _, calls = whole(parsers(name), cut)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        assert_same = streamed(parsers(name), [cut])
        assert streamed(parsers(name), [*cut]) == assert_same


@pytest.mark.parametrize(
    ("name", "text"),
    [*FORMATS, ("forced", f"[{OBJECT}, {NOW}]")],
    ids=[*IDS, "forced"],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_cut_by_a_limit_is_the_call_of_a_stream(name, text, parallel):
    found, partial = parsers(name, parallel=parallel), 0
    for end in range(len(text)):
        shown = whole_at_limit(found, text[:end])
        assert shown == streamed(found, [text[:end]]), text[:end]
        partial += any(not is_object(arguments) for _, arguments in shown[2])
    is_read_whole = '"arguments": ' in text and text.index("arguments") < text.index("name")
    assert partial > len(ARGUMENTS) / 2 or is_read_whole


MALFORMED_AT_LIMIT = MALFORMED | {
    "qwen3_coder": "<tool_call><function=weather>junk</function>",
    "glm4": "<tool_call>weather\n<arg_key>city</arg_key><arg_value>x</arg_value>junk",
    "minimax_m2": '<invoke name="weather">junk</invoke>',
    "forced": '[{"name": "now", "arguments": {x',
}


@pytest.mark.parametrize(("name", "text"), MALFORMED_AT_LIMIT.items())
def test_a_malformed_call_is_content_at_a_limit_too(name, text):
    assert whole_at_limit(parsers(name), text) == (text, "", [])


PIECES = st.sampled_from(
    sorted(
        {
            *(
                '{"name": "weather", "arguments": {',
                '{"name": "weather", "parameters": {',
                "}",
                "}}",
                '"',
                "\\",
            ),
            *("{", "[", "]", ",", ";", "\n", " ", "a", "weather", "now", "<", "</", "functions.now:0", "```"),
            *(
                "<function=",
                "</function>",
                "<parameter=city>",
                "<parameter=days>",
                "</parameter>",
                "</tool_call>",
            ),
            *(
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
                "to=functions.now",
                "final",
                "analysis",
            ),
            *("function", ">", "```json\n", "<think>", "</think>"),
            *(mark for name in TOOL_FORMATS for mark in parser_class(name).OPEN),
            *(mark for name in TOOL_FORMATS for mark in parser_class(name).NOISE),
            *(mark for name in TOOL_FORMATS for mark in parser_class(name).MARKS),
        }
    )
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(PIECES, max_size=14), st.sampled_from(["", "qwen3"]))
def test_any_text_gives_the_same_however_it_is_cut(name, pieces, reasoning):
    text = "".join(pieces)
    found = parsers(name, reasoning=reasoning)
    expected = streamed(found, [text])
    assert streamed(found, [*text, ""]) == expected
    assert streamed(found, [*pieces, ""]) == expected
    for _, arguments in whole(found, text)[2]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("value", "city", "days", "units", "wind"),
    [
        ("5", "5", 5, "5", 5),
        ("null", "null", None, None, None),
        ("True", "True", True, "True", True),
        ("a\nb", *["a\nb"] * 4),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm4"])
def test_values_in_tags_have_the_types_of_the_schema(name, value, city, days, units, wind):
    expected = {"city": city, "days": days, "units": units, "wind": wind, "other": value}
    if name == "glm4":
        tags = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key in expected)
        text = f"<tool_call>weather{tags}</tool_call>"
    else:
        tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key in expected)
        text = f"<tool_call>\n<function=weather>\n{tags}</function>\n</tool_call>"
    [(_, arguments)] = assert_same_for_all_cuts(parsers(name), text)[2]
    assert json.loads(arguments) == expected


class Release(str, Enum):
    ONE, TWO = "1.0", "true"


class Argument(BaseModel):
    """A schema with a reference to `Release` each, as Pydantic writes it."""

    plain: Release
    described: Release = Field(Release.TWO, description="with keywords beside the reference")
    free: Release | None


REFERENCES = {
    "plain": {"$ref": "#/$defs/Release"},
    "in allOf": {"allOf": [{"$ref": "#/$defs/Release"}], "default": "1.0"},
    "in allOf with notes": {"allOf": [{"description": "a"}, {"$ref": "#/$defs/Release"}, {"minLength": 1}]},
    "in a chain": {"$ref": "#/$defs/Chain"},
    "to an argument": {"$ref": "#/properties/text"},
    "with escapes": {"$ref": "#/$defs/a~1b%20c"},
    "in itself": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
    "by a constant": {"const": "1.0"},
}
DEFINED = {
    "Release": {"enum": ["1.0", "true"], "title": "Release", "type": "string"},
    "Chain": {"$ref": "#/$defs/Release", "description": "again"},
    "a/b c": {"type": "string"},
    "Loop": {"oneOf": [{"$ref": "#/$defs/Release"}, {"$ref": "#/$defs/Loop"}]},
    "Endless": {"$ref": "#/$defs/Endless"},
}


def tagged(name, arguments):
    """A call of `f`."""
    shape = {
        "qwen3_coder": (
            "<tool_call>\n<function=f>\n{}</function>\n</tool_call>",
            "<parameter={}>\n{}\n</parameter>\n",
        ),
        "glm4": ("<tool_call>f{}</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>"),
        "minimax_m2": (
            '<minimax:tool_call>\n<invoke name="f">\n{}</invoke>\n</minimax:tool_call>',
            '<parameter name="{}">{}</parameter>\n',
        ),
    }[name]
    return shape[0].format("".join(shape[1].format(key, text) for key, text in arguments.items()))


def read(name, schema, arguments):
    found = AnswerParsers(tool_format=name, tools={"f": schema})
    [(_, text)] = assert_same_for_all_cuts(found, tagged(name, arguments))[2]
    return json.loads(text)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4", "minimax_m2"])
@pytest.mark.parametrize("value", ["1.0", "true"])
def test_a_text_by_reference_is_a_text(name, value):
    given = dict.fromkeys(Argument.model_fields, value)
    assert read(name, Argument.model_json_schema(), given) == given
    schema = {"properties": {**REFERENCES, "text": {"type": "string"}}, "$defs": DEFINED}
    given = dict.fromkeys(REFERENCES, value)
    assert read(name, schema, given) == given
    root = {
        "$ref": "#/$defs/Argument",
        "$defs": {**DEFINED, "Argument": {"properties": {"a": {"type": "integer"}}}},
    }
    assert read(name, root, {"a": "5"}) == {"a": 5}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Endless"},
        {"$ref": "#/$defs/missing"},
        {"$ref": f"#/properties/a/anyOf/{'9' * 5000}", "anyOf": []},
        {"$ref": "https://elsewhere.example/schema"},
        {"$ref": 5},
        {"allOf": [{"$ref": "#/$defs/Endless"}]},
        {"anyOf": [{"$ref": "#/$defs/Release"}, {"$ref": "#/$defs/missing"}]},
    ],
)
def test_a_reference_without_a_target_allows_any_type(schema):
    assert read("glm4", {"properties": {"a": schema}, "$defs": DEFINED}, {"a": "1.0"}) == {"a": 1.0}


def test_a_large_root_behind_references_is_copied_not_read():
    class Name(str):
        num_hashes = 0

        def __hash__(self) -> int:
            Name.num_hashes += 1
            return super().__hash__()

    chain = {f"o{i}": {"$ref": f"#/$defs/o{i + 1}"} for i in range(60)}
    chain["o60"] = {"properties": {"a": {"type": "string"}}}
    schema = {"$ref": "#/$defs/o0", "$defs": chain, **{Name(f"x{i}"): 0 for i in range(1000)}}
    Name.num_hashes = 0
    assert types_of(schema, "a") == {"string"}
    assert Name.num_hashes <= 1000
    assert types_of({"$ref": "#", "properties": {"a": {"type": "null"}}}, "a") == {"null"}


def test_options_by_reference_are_read_once_each():
    options = {f"o{i}": {"anyOf": [{"$ref": f"#/$defs/o{i + 1}"}] * 9} for i in range(2000)}
    schema = {"properties": {"a": {"$ref": "#/$defs/o0"}}, "$defs": {**options, "o2000": {"type": "string"}}}
    assert types_of(schema, "a") == {"string"}


def test_a_large_schema_behind_many_references_is_read_once():
    chain = {f"o{i}": {"$ref": f"#/$defs/o{i + 1}"} for i in range(60)}
    chain |= {
        "o0": {**dict.fromkeys(map(str, range(20_000)), 0), "$ref": "#/$defs/o1"},
        "o60": {"const": "a"},
    }
    options = [{"$ref": "#/$defs/o0"} for _ in range(12_000)]
    assert types_of({"properties": {"a": {"anyOf": options}}, "$defs": chain}, "a") == {"string"}


def test_types_of_an_argument_are_read_once_per_call(monkeypatch):
    read = []
    monkeypatch.setattr(tagged_calls, "types_of", lambda schema, name: read.append(name) or STRING)
    argument = "<arg_key>{}</arg_key><arg_value>1</arg_value>"
    text = f"<tool_call>f{''.join(map(argument.format, 'abaab'))}</tool_call>"
    AnswerParsers(tool_format="glm4", tools={"f": {}}).new().push(text)
    assert read == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("['a', \"b's\"]", ["a", "b's"]),
        ("{'k': True, 'n': [None, -1.5]}", {"k": True, "n": [None, -1.5]}),
        *((text, text) for text in ("['a', b]", "{'a', 'b'}", "{1: 2}", "[('a',)]", "[b'a']")),
        *((text, text) for text in ("{[1]: 'a'}", "['\0']", "[" * 900, f"[{'-' * 9000}'a']")),
        *((text, text) for text in (r"['\ud83d']", r"{'\ud83d': 1}")),
        (r"['\u00fc']", ["\u00fc"]),
        (r"['C:\data', '\d+\.']", [r"C:\data", r"\d+\."]),
        (r"""['\x41\101\n\'', "\U0001f600"]""", ["AA\n'", "\U0001f600"]),
        ("['True, ]', 1e3 , ]", ["True, ]", 1000.0]),
        ("{'a': [1,],}", {"a": [1]}),
        *((text, text) for text in ("[,]", "[1,,]", "['a", r"[\'a']", r"['\x4']")),
    ],
)
def test_python_lists_and_objects_are_json(text, expected):
    many = {"anyOf": [{"type": "array"}, {"type": "object"}]}
    schema = {
        "properties": {
            "many": many,
            "other": {"type": ["array", "null"]},
            "text": {"type": ["string", "null"]},
        }
    }
    given = read("glm4", schema, dict.fromkeys(schema["properties"], text))
    assert (given["many"], given["text"]) == (expected, text)
    assert given["other"] == (expected if isinstance(expected, list) else text)


def test_a_wrong_escape_warns_nobody():
    """Python's parser writes a SyntaxWarning to the log, and fails under -W error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert json.loads(as_json(r"['\d']", frozenset({"array"}))) == [r"\d"]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_comes_before_the_answer(name):
    marks = REASONING_FORMATS[name]
    found = AnswerParsers(reasoning=name)
    text = f"{marks.opening}why {marks.closing[:-1]} so{marks.closing}\n\nbecause {marks.opening}"
    expected = (f"because {marks.opening}", f"why {marks.closing[:-1]} so", [])
    assert assert_same_for_all_cuts(found, text) == expected
    assert assert_same_for_all_cuts(found, "because") == ("because", "", [])
    is_open = AnswerParsers(reasoning=name, is_open=True)
    assert assert_same_for_all_cuts(is_open, text.removeprefix(marks.opening)) == expected
    assert assert_same_for_all_cuts(is_open, "endless") == ("", "endless", [])
    hidden = AnswerParsers(reasoning=name, shows_reasoning=False)
    assert assert_same_for_all_cuts(hidden, text) == (expected[0], "", [])


def test_calls_follow_reasoning():
    found = parsers("hermes", reasoning="qwen3")
    text = f"<think>\nuse <tool_call>?</think>\n\n{FORMATS[0][1]}"
    content, reasoning, calls = assert_same_for_all_cuts(found, text)
    assert (content, reasoning) == ("", "use <tool_call>?")
    assert [name for name, _ in calls] == ["weather", "now"]


LONG_TEXTS = {
    "gap": (" ", "\n", " \t"),
    "marks": ("\n<tool_call>", "<|channel|>", "[TOOL_CALLS] ", "<think>", "<|python_tag|> ; "),
    "header": ("<tool_call>x ", "<function=a ", "<|tool_call_begin|>a", "<｜tool▁call▁begin｜>` "),
    "string": ("</parameter> ", "</parameter>\n<param", "</arg_valu", "\n</func"),
}
STARTS = (
    "",
    "x",
    "<think>",
    "{",
    "<tool_call>\n<function=weather>\n<parameter=city>\n",
    "<tool_call>weather<arg_key>city</arg_key><arg_value>",
    '<tool_call>{"name": "now", "arguments": {}',
    '[TOOL_CALLS][{"name": "now", "arguments": {}}',
    '{"name": "now", "parameters": {}}',
    "<|channel|>analysis<|message|>",
)


@pytest.mark.parametrize(("name", "kind"), diagonal(sorted(TOOL_FORMATS), [*LONG_TEXTS]))
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_held_text_is_bounded_and_long_texts_are_the_same_however_they_are_cut(name, kind, step):
    """step: of the pairs of start and piece, each so many."""
    found = parsers(name, reasoning="" if name == "harmony" else "qwen3")
    for start, piece in [*product(STARTS, LONG_TEXTS[kind])][sorted(TOOL_FORMATS).index(name) % step :: step]:
        text = start + piece * (1200 // len(piece)) + "end"
        cuts = [text[at : at + 7] for at in range(0, len(text), 7)]
        assert held_most(found, cuts) < 1100, (start, piece)
        assert streamed(found, [text]) == streamed(found, [*cuts, ""]), (start, piece)


def held_most(found, pieces):
    """The longest buffer that a parser reads again at the next piece."""
    parser, most = found.new(), 0
    for piece in pieces:
        parser.push(piece)
        answer = getattr(parser, "_answer", parser)
        most = max(most, len(parser._rest), len(answer._rest))
    return most


sizes = pytest.mark.parametrize("num_chars", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])


def worst(num_chars: int) -> list[tuple[str, str]]:
    """Formats, and texts of about this length that they hold or read again."""
    white, long = " " * num_chars, "long text, " * (num_chars // 11)
    long_list = "[" + "1, " * (num_chars // 3) + "1]"
    return [
        ("hermes", '<tool_call>{"arguments": {"a": "' + long),
        ("hermes", '<tool_call>{"arguments": {"a": ' + long_list + '}, "name": "now"}</tool_call>end'),
        ("hermes", "<tool_call>[[{" * (num_chars // 14)),
        ("hermes", '<tool_call>{"a' * (num_chars // 14)),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + long_list + "}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + white + "}}</tool_call>"),
        ("hermes", "<tool_call>" + white + "end"),
        ("llama3_json", '{"name": "' + long),
        ("llama3_json", '{"parameters": {"a": "' + long),
        (
            "llama3_json",
            '{"parameters": {"a": ' + long_list + '}, "name": "now"}; {"name": "now", "parameters": {}}',
        ),
        ("llama3_json", "{" + white),
        ("mistral", '[TOOL_CALLS][{"arguments": {"a": "' + long),
        ("mistral", "[TOOL_CALLS][{[[[" * (num_chars // 17)),
        ("mistral", "[TOOL_CALLS]" + white),
        ("mistral", "[TOOL_CALLS]" + "a" * num_chars),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]" + "a" * num_chars),
        ("deepseek_v3", "<｜tool▁call▁begin｜>" + white),
        ("deepseek_v3", '<｜tool▁call▁begin｜>{"arguments": {"a": "' + long),
        ("deepseek_v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}" + "`" * num_chars),
        ("kimi", '<|tool_call_begin|>{"arguments": {"a": "' + long),
        ("kimi", "<|tool_call_begin|>now:" + "1" * num_chars),
        (
            "qwen3_coder",
            "<tool_call><function=weather><parameter=at>" + long_list + "</parameter></function>",
        ),
        ("qwen3_coder", "<tool_call><function=weather><parameter=at>" + "</parameter> x" * (num_chars // 14)),
        ("qwen3_coder", "<tool_call><function=weather><parameter=at>" + "\n" * num_chars),
        ("qwen3_coder", "<tool_call><function=weather><parameter=" + white),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>x</parameter>" + white),
        (
            "glm4",
            "<tool_call>weather<arg_key>at</arg_key><arg_value>" + long_list + "</arg_value></tool_call>",
        ),
        ("glm4", "<tool_call>weather<arg_key>days</arg_key><arg_value>" + long),
        ("glm4", "<tool_call>weather<arg_key>" + white),
        ("harmony", "<|channel|>" + long),
        ("harmony", "<|channel|>final<|message|>x<|end|>" + white),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>" + long_list),
    ]


@pytest.mark.parametrize("number", range(len(worst(30))))
@sizes
def test_the_worst_texts_are_read_in_linear_work_and_are_the_same_however_they_are_cut(number, num_chars):
    name, text = worst(num_chars)[number]
    found = parsers(name)
    tokens = [text[at : at + 5] for at in range(0, len(text), 5)]
    assert held_most(found, tokens) < 1100
    assert streamed(found, [*tokens, ""]) == streamed(found, [text, ""])


@pytest.mark.parametrize("name", REASONING_FORMATS)
@sizes
def test_long_reasoning_is_read_in_linear_work(name, num_chars):
    marks = REASONING_FORMATS[name]
    found = AnswerParsers(reasoning=name)
    for piece in (" ", "long text, ", f"{marks.closing[:-1]} "):
        text = marks.opening + "a" + piece * (num_chars // len(piece))
        tokens = [text[at : at + 5] for at in range(0, len(text), 5)]
        assert held_most(found, tokens) < 300
        assert streamed(found, [text, ""]) == streamed(found, [*tokens, ""])


@pytest.mark.parametrize("size", with_quick([60_000, 65_536, 65_537, 70_000], (65_536, 65_537)))
def test_text_that_waits_for_its_end_is_bounded(size):
    """A too long object is content, and a too long value a string."""
    words = '["' + "a" * (size - 4) + '"]'
    tags = "<tool_call>now<arg_key>a</arg_key><arg_value>", "</arg_value></tool_call>"
    schemas = {"now": {"type": "object", "properties": {"a": {"type": "array"}}}}
    glm = AnswerParsers(tool_format="glm4", tools=schemas)
    head, tail = '{"arguments": {"a": "', '"}, "name": "now"}'
    named = head + "1" * (size - len(head) - len(tail)) + tail
    for found, text, is_read in [
        (glm, words.join(tags), True),
        (parsers("hermes"), f"<tool_call>{named}</tool_call>", size <= 65_536),
        (parsers("mistral"), f"[TOOL_CALLS]{named}", size <= 65_536),
    ]:
        content, _, calls = streamed(found, [text, ""])
        tokens = [text[at : at + 3] for at in range(0, len(text), 3)]
        assert streamed(found, [*tokens, ""]) == (content, "", calls)
        assert bool(calls) == is_read
        assert content == ("" if is_read else text)
        if found is glm:
            value = json.loads(calls[0][1])["a"]
            assert value == (json.loads(words) if size <= 65_536 else words)


@pytest.mark.parametrize(("name", "text"), FORMATS, ids=IDS)
def test_many_malformed_calls_stay_in_order(name, text):
    malformed = MALFORMED[name].removesuffix(" end")
    many = "".join(f"{malformed}\n{number};" for number in range(20))
    found = parsers(name)
    assert streamed(found, [*many, ""]) == streamed(found, [many, ""])
    content, _, _ = whole(found, many)
    assert [content.find(f"{number};") for number in range(20)] == sorted(
        content.find(f"{number};") for number in range(20)
    )


def test_channels_of_harmony():
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>Look. "
        "<|end|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done"
    )
    found = AnswerParsers(reasoning="harmony", tool_format="harmony")
    assert assert_same_for_all_cuts(found, text) == ("Look. Done", "Think.\nMore.", [])


def test_arguments_are_streamed_before_the_call_ends():
    for name, text in FORMATS:
        if '[{"arguments"' in text:
            continue
        choice, seen = ParsedChoice(parsers(name)), 0
        for char in text[: text.index("Paulo") + 5]:
            seen += bool(choice.read(char, ended=False).calls)
        assert seen > 5, name


def test_the_settings_name_the_formats():
    assert {"auto", "none", *TOOL_FORMATS} == set(TOOL_PARSERS)
    assert {"auto", "none", "harmony", *REASONING_FORMATS} == set(REASONING_PARSERS)
    assert {"call", "arguments", "end"} <= set(get_args(Kind))
