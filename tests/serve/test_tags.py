# SPDX-License-Identifier: Apache-2.0
"""Grammars of structural tags against a checker that tries every reading of a text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from moe_lora.engine.text.grammars import grammar_tokenizer, limits
from moe_lora.engine.text.text import REPLACEMENT, Tokenizer
from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.openai import structured
from moe_lora.serve.openai.parsers.choice import AnswerParsers
from moe_lora.serve.openai.protocol import ChatRequest
from moe_lora.serve.openai.structured import body_grammar, checked_grammar
from moe_lora.serve.openai.tags.rules import TagRules
from moe_lora.serve.openai.tags.structural import add_structural_tag
from tests.grids import diagonal
from tests.small_tokenizers import byte_level

A = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
B = {"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 2}
STRUCTURES: list[dict[str, Any]] = [
    {"begin": "<f=a>", "schema": A, "end": "</f>"},
    {"begin": "<f=b>", "schema": B, "end": "</f>"},
    {"begin": "[g]", "schema": B, "end": "!"},
]
TRIGGERS = ["<f=", "[g]"]
PIECES = [
    "<f=",
    "<f=a>",
    "<f=b>",
    "[g]",
    '{"a": 1}',
    "[1]",
    '["x", 1]',
    "</f>",
    "!",
    "{}",
    "<",
    "a>",
    "x",
    " ",
    "1",
]
NUM_TEXTS = 200


def tokenizer_with(marks: Sequence[str], *, special: bool = True) -> Tokenizer:
    return _tokenizer_with(tuple(marks) if special else ())


@cache
def _tokenizer_with(marks: tuple[str, ...]) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens([*marks])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


def grammar_of(tokenizer: Tokenizer, parsers: AnswerParsers | None = None, **fields: Any) -> str:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    asked = body_grammar(body, tokenizer, parsers)
    assert asked is not None
    return checked_grammar(asked)


class Masks:
    """The grammar over a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, grammar: str) -> None:
        self._tokenizer = tokenizer
        self._size = tokenizer.vocab_size
        [*ends] = tokenizer.eos_token_ids
        self.tokenizer = grammar_tokenizer(tokenizer, self._size, ends)
        self._matcher = LLMatcher(self.tokenizer, grammar, limits=limits(), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def after(self, text: str) -> LLMatcher | None:
        """The state after the text; None: the grammar excludes the text."""
        matcher = self._matcher.deep_copy()
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None

    def accepts(self, text: str) -> bool:
        matcher = self.after(text)
        return matcher is not None and matcher.is_accepting()

    def excluded(self, text: str) -> list[int]:
        """Tokens that may not follow."""
        matcher = self.after(text)
        assert matcher is not None
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        return [one for one in range(self._size) if not words[one // 32] >> np.uint32(one % 32) & 1]


def is_json(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def reads(text: str, at: int = 0) -> bool:
    """True if a reading of the text from here holds every structure."""
    ends = [found + len(one) for one in TRIGGERS if (found := text.find(one, at)) >= 0]
    if not ends:
        return True
    [start] = [min(ends) - len(one) for one in TRIGGERS if text[: min(ends)].endswith(one)]
    for one in STRUCTURES:
        if text.startswith(one["begin"], start):
            inside = start + len(one["begin"])
            for end in range(inside, len(text)):
                closes = text.startswith(one["end"], end) and is_json(text[inside:end], one["schema"])
                if closes and reads(text, end + len(one["end"])):
                    return True
    return False


def tag_of(one: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": one["schema"]}
    return {"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]}


DISPATCH = {"type": "triggered_tags", "triggers": TRIGGERS, "tags": list(map(tag_of, STRUCTURES))}
OLD = {"type": "structural_tag", "structures": STRUCTURES, "triggers": TRIGGERS}
NEW = {"type": "structural_tag", "format": DISPATCH}


def random_texts(rng: random.Random) -> list[str]:
    """Texts of pieces; half of them begin with whole structures."""
    whole = ['<f=a>{"a": 12}</f>', '<f=b>["x"]</f>', "[g][1, 1]!"]
    return [
        "".join(
            rng.choices(whole, k=rng.randint(0, 2)) * (number % 2) + rng.choices(PIECES, k=rng.randint(0, 6))
        )
        for number in range(NUM_TEXTS)
    ]


GIVEN = [
    {"response_format": OLD},
    {"response_format": NEW},
    {"structured_outputs": {"structural_tag": json.dumps(OLD)}},
]


@pytest.mark.parametrize(("fields", "marks"), diagonal(GIVEN, [(), ("[g]", "</f>")]))
def test_structures_hold_and_other_text_is_free(fields, marks):
    tokenizer = tokenizer_with(marks)
    masks = Masks(tokenizer, grammar_of(tokenizer, **fields))
    texts = random_texts(random.Random(3))
    wanted = [reads(text) for text in texts]
    assert 0.2 * NUM_TEXTS < sum(wanted) < 0.8 * NUM_TEXTS
    for text, want in zip(texts, wanted, strict=True):
        assert masks.accepts(text) == want, text


@pytest.mark.parametrize("before", ["", "hello <f", 'so <f=a>{"a": 1}</f> and'])
def test_tokens_outside_of_tags_are_unconstrained(before):
    tokenizer = tokenizer_with(["<other>", "[g]"])
    masks = Masks(tokenizer, grammar_of(tokenizer, response_format=OLD))
    end = tokenizer.backend.token_to_id("</s>")
    for token in masks.excluded(before):
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert token == end or REPLACEMENT in text or not reads(before + text), text
    assert masks.accepts(f"{before}<other> more")


FREE = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "[a-c]{2}"}
THINK = {"type": "tag", "begin": "<think>", "content": FREE, "end": "</think>"}
NOTE = {"type": "tag", "begin": "(", "content": WORD, "end": [")", "]"]}
FORMATS = [
    ({"type": "const_string", "value": 'a "b"\n'}, ['a "b"\n'], ["", 'a "b"', 'a "b"\n!']),
    ({"type": "const_string", "value": "\x00\x1f\x7f\x85"}, ["\x00\x1f\x7f\x85"], ["\x00\x1f\x85", "u007f"]),
    (WORD, ["ab"], ["", "abc", "d"]),
    ({"type": "grammar", "grammar": 'root ::= "x" | "yy"'}, ["x", "yy"], ["y"]),
    ({"type": "json_schema", "json_schema": B}, ["[1]", "[]"], ["[2]", "1"]),
    (FREE, ["", "anything <think>"], []),
    ({"type": "or", "elements": [WORD, {"type": "const_string", "value": "no"}]}, ["ab", "no"], ["abno", ""]),
    (
        {"type": "sequence", "elements": [THINK, WORD]},
        ["<think>x</think>ab", "<think></think>ca"],
        ["ab", "<think>ab"],
    ),
    ({"type": "sequence", "elements": [WORD, FREE]}, ["ab", "ab and more"], ["a"]),
    (NOTE, ["(ab)", "(ab]"], ["(ab", "ab)", "(ab))"]),
    (
        {"type": "tags_with_separator", "tags": [NOTE, {**THINK}], "separator": ", "},
        ["", "(ab)", "(ab), <think>x</think>, (cc]"],
        ["(ab),", "(ab) (ab)", ", (ab)"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [NOTE],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["(ab)"],
        ["", "(ab),(ab)"],
    ),
    (
        {**DISPATCH, "at_least_one": True},
        ["[g][1]!", "[g][1]! and [g][]! or"],
        ["", "x", "so [g][1]!", "[g][1]! [g]x"],
    ),
    ({**DISPATCH, "stop_after_first": True}, ["", "so", "so [g][1]!"], ["[g][1]! more", "[g]x"]),
    (
        {**DISPATCH, "at_least_one": True, "stop_after_first": True},
        ["[g][1]!"],
        ["", "[g][1]! ", "so [g][1]!"],
    ),
]


@pytest.mark.parametrize(("format_of_tags", "special"), diagonal(FORMATS, [False, True]))
def test_formats_of_structural_tags_hold(format_of_tags, special):
    given, whole, wrong = format_of_tags
    tokenizer = tokenizer_with(["<think>", "</think>", "[g]"], special=special)
    masks = Masks(
        tokenizer, grammar_of(tokenizer, response_format={"type": "structural_tag", "format": given})
    )
    assert [text for text in whole if not masks.accepts(text)] == []
    assert [text for text in wrong if masks.accepts(text)] == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"format": {"type": "qwen_xml_parameter", "json_schema": A}},
            "'qwen_xml_parameter' is not supported",
        ),
        ({"format": {**DISPATCH, "excludes": ["x"]}}, "excludes"),
        ({"format": {"type": "sequence", "elements": [FREE, WORD]}}, "any_text is supported at the end"),
        (
            {"format": {"type": "sequence", "elements": [DISPATCH, WORD]}},
            "triggered_tags is supported at the end",
        ),
        ({"format": {"type": "sequence", "elements": []}}, "elements"),
        ({"format": {"type": "regex"}}, "pattern"),
        ({"format": {"type": "regex", "pattern": "("}}, "regex"),
        ({"format": {**THINK, "end": ""}}, "end"),
        ({"format": {**THINK, "end": ["a", "b"]}}, "one end"),
        ({"format": {**NOTE, "style": 1}}, "style"),
        ({"format": DISPATCH, "structures": STRUCTURES}, "send one of them"),
        ({"structures": STRUCTURES, "triggers": ["<f="]}, "'[g]' begins with no trigger"),
        ({"structures": STRUCTURES, "triggers": [*TRIGGERS, "<f"]}, "overlap"),
        ({"structures": STRUCTURES, "triggers": ["x[g]", *TRIGGERS]}, "special token '[g]'"),
        ({"structures": [], "triggers": TRIGGERS}, "structures"),
        ({"structures": STRUCTURES}, "triggers"),
        (
            {"structures": [{"begin": "<f=", "schema": {"type": "strang"}, "end": ""}], "triggers": ["<f="]},
            "strang",
        ),
        (
            {
                "structures": [{"begin": "<f=", "schema": {"uniqueItems": True}, "end": ""}],
                "triggers": ["<f="],
            },
            "uniqueItems",
        ),
        ({"structure": []}, "structure"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_other_structural_tags_are_refused_by_name(given, words):
    tokenizer = tokenizer_with(["[g]"])
    with pytest.raises(ApiError) as error:
        grammar_of(tokenizer, response_format={"type": "structural_tag", **given})
    assert error.value.status == 400
    assert words in str(error.value)


def test_an_equal_inner_grammar_is_found_without_comparisons():
    class Counted(dict[str, Any]):
        num_compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.num_compared += 1
            return super().__eq__(other)

        __hash__ = None

    rules = TagRules({})
    names = [rules.within("json", Counted(a=number % 50)) for number in range(200)]
    assert Counted.num_compared == 0
    assert names == 4 * [f"@inner_{number}" for number in range(50)]
    assert len(rules.inner) == 50
    ordered = [rules.within("json", {"properties": one}) for one in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert len(set(ordered)) == 2, "the order of properties is the order of the answer"


def nested(num_lists: int, num_elements: int) -> dict[str, Any]:
    """A sequence of sequences."""
    texts = [{"type": "const_string", "value": "a"}] * num_elements
    return {"type": "sequence", "elements": [{"type": "sequence", "elements": texts}] * num_lists}


def chain(num_tags: int) -> dict[str, Any]:
    """A tag within a tag, and so on."""
    found = WORD
    for _ in range(num_tags):
        found = {"type": "tag", "begin": "(", "content": found, "end": [")"]}
    return found


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (nested(4, 254), nested(4, 255)),
        ({"type": "or", "elements": [chain(90)] * 11}, {"type": "or", "elements": [chain(90)] * 12}),
        (
            {"type": "or", "elements": [{**NOTE, "end": [")"] * 250}] * 4},
            {"type": "or", "elements": [{**NOTE, "end": [")"] * 255}] * 4},
        ),
    ],
    ids=["elements", "tags", "ends"],
)
def test_elements_tags_and_ends_are_bounded_in_all(within, beyond):
    add_structural_tag({"format": within}, TagRules({}))
    with pytest.raises(ApiError, match="more than 1024 elements, tags and ends") as error:
        grammar_of(tokenizer_with([]), response_format={"type": "structural_tag", "format": beyond})
    assert error.value.status == 400


@pytest.mark.parametrize("is_text", [False, True])
def test_very_deep_tags_are_refused_by_name(is_text):
    given = {"type": "any_text"}
    for _ in range(900):
        given = {"type": "or", "elements": [given]}
    given = {"format": given}
    if is_text:
        given = '{"format": ' + '{"type": "or", "elements": [' * 60_000
    with pytest.raises(ApiError, match="too deep in each other; nest fewer") as error:
        grammar_of(tokenizer_with([]), structured_outputs={"structural_tag": given})
    assert (error.value.status, "recursion" in error.value.message) == (400, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", "format": {**NOTE, "end": ""}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 5}, "strict": True}}]},
    ],
    ids=["structural", "strict"],
)
def test_tags_become_rules_in_the_bounded_child(fields, monkeypatch):
    def in_child(make):
        raise ValueError("beyond the limits")

    monkeypatch.setattr(structured, "in_child", in_child)
    monkeypatch.setattr(TagRules, "__init__", None)
    parsers = AnswerParsers(tool_format="glm4", has_strict="tools" in fields)
    with pytest.raises(ApiError, match="beyond the limits"):
        grammar_of(tokenizer_with([]), parsers, **fields)
