# SPDX-License-Identifier: Apache-2.0
"""Strict calls under tool_choice=auto in each format, and forced calls of GPT-OSS, against their masks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moe_lora.engine.step.grammar_masks import BITS, Follower
from moe_lora.engine.text.text import Tokenizer
from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.openai.parsers import TOOL_FORMATS, parser_class
from moe_lora.serve.openai.parsers.answers import ParsedChoice, hidden_ids
from moe_lora.serve.openai.parsers.choice import AnswerParsers
from tests.grids import diagonal

from .conftest import serving
from .scripted_engine import ScriptedEngine
from .test_tags import A, B, Masks, grammar_of, tokenizer_with


def tool(name: str, parameters: Any, *, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("f", A, strict=True), tool("g", A, strict=False)]
CALLS = {
    "hermes": ['<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>'],
    "mistral": ["[TOOL_CALLS]{0}[ARGS]{1}", '[TOOL_CALLS][{{"name": "{0}", "arguments": {1}}}]'],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{0}\n```json\n{1}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{0}<｜tool▁sep｜>{1}<｜tool▁call▁end｜>",
    ],
    "kimi": ["<|tool_call_begin|>functions.{0}:12<|tool_call_argument_begin|>{1}<|tool_call_end|>"],
    "qwen3_coder": [
        "<tool_call>\n<function={0}>\n{1}</function>\n</tool_call>",
        "<function={0}>\n{1}</function>",
    ],
    "glm4": ["<tool_call>{0}\n{1}</tool_call>"],
    "llama3_json": [
        '{{"name": "{0}", "parameters": {1}}}',
        '<|python_tag|>{{"name": "{0}", "parameters": {1}}}',
    ],
    "granite": [
        '<|tool_call|>[{{"name": "{0}", "arguments": {1}}}]',
        '<tool_call>[{{"name": "{0}", "arguments": {1}}}]',
    ],
    "minimax_m2": ['<minimax:tool_call>\n<invoke name="{0}">\n{1}</invoke>\n</minimax:tool_call>'],
    "harmony": [
        "<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>{1}<|call|>",
        "<|start|>assistant to=functions.{0}<|channel|>commentary json<|message|>{1}<|call|>",
    ],
}
BEFORE = {"harmony": "<|channel|>analysis<|message|>Hm: {<|end|>"}


def parsed_by(name: str, **options: Any) -> AnswerParsers:
    return AnswerParsers(tool_format=name, tools={"f": A, "g": A}, has_strict=True, **options)


def call_of(name: str, shape: str, function: str, arguments: Any) -> str:
    """The call in a format."""
    around = {
        "qwen3_coder": "<parameter={0}>\n{1}\n</parameter>\n",
        "glm4": "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n",
        "minimax_m2": '<parameter name="{0}">{1}</parameter>\n',
    }
    text = json.dumps(arguments)
    if name in around and isinstance(arguments, dict):
        shown = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
        text = "".join(around[name].format(key, one) for key, one in shown.items())
    return shape.format(function, text)


@pytest.mark.parametrize(
    ("name", "special"),
    diagonal([name for name in TOOL_FORMATS if parser_class(name).SHAPES], [False, True]),
)
def test_strict_calls_hold_their_schema_and_other_text_is_free(name, special):
    kind = parser_class(name)
    marks = {*kind.OPEN, *kind.NOISE, *kind.MARKS, kind.CLOSE, getattr(kind, "KEY", "")} - {""}
    tokenizer = tokenizer_with(sorted(marks), special=special)
    parsers = parsed_by(name)
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=TOOLS))
    before, between = ("", ";") if name == "llama3_json" else (BEFORE.get(name, "Let me see. "), "\n")
    for shape in CALLS[name]:
        valid = call_of(name, shape, "f", {"a": 1})
        other = call_of(name, shape, "g", {"b": [None]})
        for text in ("", "Plain. {", before, before + valid, valid + between + valid, other):
            assert masks.accepts(text), text
        calls = ParsedChoice(parsers).whole(before + valid)[1]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"a": 1})]
        for function, arguments in (
            ("f", {"a": "x"}),
            ("f", {}),
            ("f", {"a": 1, "b": 2}),
            ("g", [1]),
            ("h", {}),
        ):
            assert masks.after(before + call_of(name, shape, function, arguments)) is None
        assert not masks.accepts(before + valid[: valid.index("1") + 1])


FORMATS = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": A}}},
        '{"a": 7}',
        '{"b": 7}',
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"b": [7]}', "[7]"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
}
NOISE = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", ""),
    "minimax_m2": ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
}
WRAPPED = {"kimi": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("name", "special"),
    diagonal([name for name in TOOL_FORMATS if parser_class(name).SHAPES], [False, True]),
)
def test_beside_a_format_the_answer_is_a_call_or_in_the_format(name, special, form):
    fields, valid, wrong = FORMATS[form]
    kind = parser_class(name)
    marks = {*kind.OPEN, *kind.NOISE, *kind.MARKS, kind.CLOSE, getattr(kind, "KEY", "")} - {""}
    tokenizer = tokenizer_with(sorted(marks), special=special)
    parsers = parsed_by(name, reasoning="harmony" if name == "harmony" else "")
    if kind.LEADS and form == "json_object":
        with pytest.raises(ApiError, match="beside strict tools is not supported for the calls of llama3"):
            grammar_of(tokenizer, parsers, tools=TOOLS, **fields)
        parsers = AnswerParsers(tool_format=name, tools={"g": A})
        masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=TOOLS[1:], **fields))
        for text in (valid, *(call_of(name, shape, "g", {"b": "x"}) for shape in CALLS[name])):
            assert masks.accepts(text), text
        return
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=TOOLS, **fields))
    before = f"{BEFORE['harmony']}<|start|>assistant" if name == "harmony" else ""
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    shapes = CALLS[name][:1] if name == "harmony" else CALLS[name]
    around = [("", ""), *([WRAPPED[name]] if name in WRAPPED else [])]
    for shape in shapes:
        call = before + call_of(name, shape, "f", {"a": 1})
        if name not in ("harmony", "llama3_json"):
            opening, closing = NOISE.get(name, ("", ""))
            assert masks.accepts(f"{call.removesuffix(closing)}\n{call.removeprefix(opening)}")
        for more in ("\n", "\nsome words", f"\n{valid}", f" so {call}"):
            assert not masks.accepts(call + more), more
        for opening, closing in around:
            for function, arguments in (("f", {"a": 1}), ("g", {"b": "x"})):
                call = f"{before}{opening}{call_of(name, shape, function, arguments)}{closing}"
                assert masks.accepts(call), call
                calls = ParsedChoice(parsers).whole(call)[1]
                assert [(one.name, json.loads(one.arguments)) for one in calls] == [(function, arguments)]
        for function, arguments in (("f", {"a": "x"}), ("h", {})):
            call = call_of(name, shape, function, arguments)
            assert not masks.accepts(before + call), call
    for text in (final + valid, before + final + valid):
        assert masks.accepts(text), text
        pieces, calls = ParsedChoice(parsers).whole(text)
        assert (pieces.content, calls) == (valid, [])
    for text in ("", before, final + wrong, "Let me see.", final + valid[:-1]):
        assert not masks.accepts(text), text


TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_request_with_tools_and_a_format_may_get_either(path):
    base = tokenizer_with([])
    tokenizer = Tokenizer(base.backend, special_tokens=base.special_tokens, chat_template=TEMPLATE)
    call, answer = call_of("hermes", CALLS["hermes"][0], "f", {"a": 1}), '{"a": 7}'
    form = {"name": "r", "schema": A}
    bodies = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": form},
            "tools": TOOLS,
        },
        "/v1/responses": {
            "input": "x",
            "text": {"format": {"type": "json_schema", **form}},
            "tools": [{"type": "function", **one["function"]} for one in TOOLS],
        },
    }
    ids = [*tokenizer.encode(call, add_special_tokens=False), *tokenizer.eos_token_ids]
    engine = ScriptedEngine({None: ids}, vocab_size=tokenizer.vocab_size, max_model_len=1000)
    with serving(engine, tokenizer) as server:
        answered = server.post(path, bodies[path])
    assert answered.status_code == 200, answered.text
    found = answered.json()
    [called] = found["output"] if "output" in found else found["choices"][0]["message"]["tool_calls"]
    assert json.loads(called.get("function", called)["arguments"]) == {"a": 1}
    masks = Masks(tokenizer, engine.requests[0].sampling.grammar)
    assert masks.accepts(call)
    assert masks.accepts(answer)
    assert masks.after("Plain") is None


def test_beside_a_format_the_call_or_format_comes_after_the_reasoning():
    tokenizer = tokenizer_with(["<think>", "</think>", "<tool_call>"])
    parsers, (fields, valid, wrong) = parsed_by("hermes", reasoning="qwen3"), FORMATS["json_schema"]
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=TOOLS, **fields))
    call, thought = CALLS["hermes"][0].format("f", '{"a": 1}'), "<think>maybe so</think>\n\n"
    for text in (call, valid, thought + call, thought + valid):
        assert masks.accepts(text), text
    for text in ("", thought, wrong, thought + wrong, "Plain."):
        assert not masks.accepts(text), text


def test_a_format_beside_tools_without_a_shape_of_calls_is_refused_by_both_names():
    [name] = [name for name in TOOL_FORMATS if not parser_class(name).SHAPES]
    parsers = AnswerParsers(tool_format=name, tools={"f": A})
    with pytest.raises(ApiError, match=r"response_format beside tools .* gemma4") as error:
        grammar_of(tokenizer_with([]), parsers, tools=TOOLS, **FORMATS["json_schema"][0])
    assert (error.value.status, error.value.param) == (400, "response_format")


def test_an_error_beside_a_format_names_the_part_that_is_wrong():
    unique = {"type": "array", "uniqueItems": True}
    wide = {f"{number:03}".ljust(60, "x"): {"enum": [*range(60)]} for number in range(300)}
    large = [*range(1 << 15)]
    for given, asked, words, param in (
        ({"a": unique}, {}, r"^tools: function 'f': .*uniqueItems", "tools"),
        (wide, {}, r"^response_format beside tools: the grammar has \d+ characters", "tools"),
        ({}, {"enum": large}, r"^response_format: the grammar has \d+ characters", "response_format"),
    ):
        tools = [tool(name, {"type": "object", "properties": given}, strict=True) for name in "fgh"]
        form = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "object", **asked}}}
        with pytest.raises(ApiError, match=words) as error:
            grammar_of(tokenizer_with([]), parsed_by("hermes"), tools=tools, response_format=form)
        assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if parser_class(name).SHAPES])
def test_many_free_tools_fit_beside_a_format(name):
    tools = [tool(f"do_{number}".ljust(40, "x"), {"type": "object"}, strict=False) for number in range(128)]
    names = {one["function"]["name"]: {} for one in tools}
    parsers = AnswerParsers(tool_format=name, tools=names, reasoning="harmony" if name == "harmony" else "")
    assert grammar_of(tokenizer_with([]), parsers, tools=tools, **FORMATS["json_schema"][0])


HIDDEN = "<|x|>"


@pytest.mark.parametrize(
    ("name", "special"), diagonal(["hermes", "llama3_json", "qwen3_coder"], [False, True])
)
def test_a_hidden_special_token_opens_no_call(name, special):
    """`MarkedText` drops the token, so the parser reads the text around as one."""
    marks = sorted(parsed_by(name).marks()) if special else []
    tokenizer = tokenizer_with([*marks, HIDDEN, "<|eot|>"])
    backend = tokenizer.backend
    backend.add_tokens(["<shown>"])
    masks = Masks(tokenizer, grammar_of(tokenizer, parsed_by(name), tools=TOOLS))
    hidden = [backend.token_to_id(one) for one in (HIDDEN, "<|eot|>", "<s>")]
    for shape in CALLS[name]:
        valid = call_of(name, shape, "f", {"a": 1})
        places = range(valid.index("f") + 1)
        refused = [masks.after(valid[:at] + HIDDEN) is None for at in places]
        assert all(refused), valid
        assert masks.accepts(valid)
    for text in ("", "Plain <tool_"):
        assert set(hidden) <= set(masks.excluded(text))
        follower = Follower(masks.after(text), masks.tokenizer, hidden[1:2], hidden[2:], tokenizer.vocab_size)
        words = follower.advance([]).words
        allowed = [bool(words[one // BITS] >> np.uint32(one % BITS) & 1) for one in hidden]
        assert allowed == [False, True, False], "only the answer's end"
    assert masks.accepts("Plain <shown> more")


def test_a_special_closing_mark_is_read_and_never_hidden():
    """The mark ends a call, and the text around a call may have the mark."""
    close = parser_class("hermes").CLOSE
    tokenizer = tokenizer_with([close])
    parsers = parsed_by("hermes")
    assert tokenizer.backend.token_to_id(close) not in hidden_ids(tokenizer, parsers.marks())
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=TOOLS))
    call = call_of("hermes", CALLS["hermes"][0], "f", {"a": 1})
    for text in (call, f"Plain {close} more", f"{call} {close}"):
        assert masks.accepts(text), text


def test_a_hidden_special_token_ends_neither_reasoning_nor_a_value():
    tokenizer = tokenizer_with([HIDDEN])
    parsers = parsed_by("hermes", reasoning="qwen3")
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=TOOLS))
    assert masks.after("<think>so</thin") is not None
    assert masks.after(f"<think>so</thin{HIDDEN}") is None
    tools = [tool("f", WORDS, strict=True)]
    parsers = AnswerParsers(tool_format="glm4", tools={"f": WORDS}, has_strict=True)
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=tools))
    before = "<tool_call>f\n<arg_key>word</arg_key>\n<arg_value>x</arg_"
    assert masks.after(before) is not None
    assert masks.after(before + HIDDEN) is None


EITHER = {"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b"]}, {"$ref": "#/$defs/either"}]}
WORDS = {
    "type": "object",
    "properties": {
        "word": {"type": "string"},
        "kind": {"enum": ["new", "old"]},
        "list": {"$ref": "#/$defs/list"},
        "size": {"$ref": "#/$defs/size", "description": "of a text"},
        "same": {"allOf": [{"$ref": "#/properties/size"}]},
        "free": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]},
        "either": {"anyOf": [{"$ref": "#/$defs/size"}, {"$ref": "#/$defs/either"}], "default": "2"},
        "any": {"oneOf": [{"$ref": "#/$defs/size"}, {"type": "string"}], "title": "Any"},
    },
    "required": ["word"],
    "$defs": {"list": B, "size": {"type": "string", "enum": ["1.0", "2"]}, "either": EITHER},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4"])
def test_texts_in_tags_are_as_they_are_and_end_once(name):
    [*_, shape] = CALLS[name]
    tokenizer = tokenizer_with([])
    parsers = AnswerParsers(tool_format=name, tools={"f": WORDS}, has_strict=True)
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=[tool("f", WORDS, strict=True)]))
    valid = [
        {"word": 'a "b"\n<c'},
        {"word": "", "kind": "new"},
        {"word": "x", "kind": "old", "list": [1, "x"]},
        {"word": "x", "size": "1.0", "same": "2", "free": None},
        *({"word": "x", "either": value} for value in ("2", "a", "b")),
        {"word": "x", "any": "other"},
    ]
    for arguments in valid:
        text = call_of(name, shape, "f", arguments)
        assert masks.accepts(text), text
        [call] = ParsedChoice(parsers).whole(text)[1]
        assert json.loads(call.arguments) == arguments
    key = (
        "\n<parameter=kind>\n"
        if name == "qwen3_coder"
        else "</arg_value>\n<arg_key>kind</arg_key>\n<arg_value>"
    )
    for arguments in (
        {"kind": "new"},
        {"word": "x", "kind": "odd"},
        {"word": "x", "list": [2]},
        {"word": "x", "size": "3"},
        {"word": "x", "same": "3"},
        {"word": "x", "free": "1.0"},
        {"word": "x", "either": "c"},
        {"word": f"x{key}odd"},
    ):
        assert masks.after(call_of(name, shape, "f", arguments)) is None, arguments


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "maxLength of the text 'a'"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "must be texts"),
        *(
            ({"properties": {"a": schema, "b": B, "c": {"type": "string", "maxLength": 3}}}, words)
            for schema, words in (
                ({"$ref": "#/properties/c"}, "maxLength of the text 'a'"),
                ({"$ref": "#/properties/a", "type": "string", "enum": ["a"]}, "enum of the text 'a'"),
                ({"$ref": "#/missing", "type": "string"}, "an option of the text 'a'"),
                ({"allOf": [{"enum": ["a"]}, {"const": "a"}]}, "allOf of the text 'a'"),
                ({"anyOf": [{"enum": ["a"]}, {"$ref": "#/properties/c"}]}, "maxLength of the text 'a'"),
                ({"anyOf": [{"type": "null"}], "type": "string"}, "must be texts"),
                ({"anyOf": [], "type": "string"}, "anyOf of the text 'a'"),
                ({"anyOf": 5, "type": "string"}, "anyOf of the text 'a'"),
            )
        ),
        ({"properties": {"a": {"type": "strang"}}}, "strang"),
        ({"properties": {"a": 5}}, "the schema of 'a'"),
        ({"properties": [1]}, "properties"),
        ({"required": [["a"]]}, "required"),
        ({"minProperties": 1}, "minProperties"),
    ],
)
def test_schemas_without_an_effect_in_tags_are_refused_by_name(parameters, words):
    tools = [tool("f", {"type": "object", **parameters}, strict=True)]
    with pytest.raises(ApiError, match=words) as error:
        grammar_of(tokenizer_with([]), parsed_by("glm4"), tools=tools)
    assert (error.value.status, error.value.param) == (400, "tools")


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("is_open", [False, True])
def test_strict_calls_begin_after_the_reasoning(special, is_open):
    tokenizer = tokenizer_with(["<think>", "</think>", "<tool_call>"], special=special)
    masks = Masks(
        tokenizer, grammar_of(tokenizer, parsed_by("hermes", reasoning="qwen3", is_open=is_open), tools=TOOLS)
    )
    valid, wrong = (CALLS["hermes"][0].format("f", one) for one in ('{"a": 1}', "{}"))
    thought = f"{'' if is_open else chr(10) + '<think>'}maybe {wrong} or {wrong[:15]}"
    for text in ("", thought, f"{thought}</think>", f"{thought}</think>\n\nso {valid}"):
        assert masks.accepts(text), text
    assert masks.after(f"{thought}</think>{wrong}") is None
    assert is_open == (masks.after(wrong) is not None)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
def test_forced_calls_of_harmony_have_its_channels(special):
    kind = parser_class("harmony")
    tokenizer = tokenizer_with([*kind.OPEN, *kind.MARKS], special=special)
    parsers = AnswerParsers(tool_format="harmony", reasoning="harmony", tools={"f": A})
    masks = Masks(tokenizer, grammar_of(tokenizer, parsers, tools=TOOLS, tool_choice="required"))
    call, thought = CALLS["harmony"][0].format("f", '{"a": 1}'), BEFORE["harmony"] + "<|start|>assistant"
    for text in (call, call.removesuffix("<|call|>"), thought + call, thought + thought + call):
        assert masks.accepts(text), text
        assert [one.name for one in ParsedChoice(parsers).whole(text)[1]] == ["f"]
    for text in (
        "",
        "hello",
        thought,
        f"{call} more",
        "<|channel|>final<|message|>no",
        CALLS["harmony"][0].format("f", "{}"),
    ):
        assert not masks.accepts(text), text
