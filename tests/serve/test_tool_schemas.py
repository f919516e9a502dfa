# SPDX-License-Identifier: Apache-2.0
"""Grammars of forced calls: the functions' schemas hold as jsonschema reads them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from moe_lora import LLM, SamplingParams
from moe_lora.engine.text.grammars import check_grammar, grammar_tokenizer, limits
from moe_lora.engine.text.text import Tokenizer
from moe_lora.serve.openai.parsers.answers import ParsedChoice
from moe_lora.serve.openai.parsers.choice import AnswerParsers
from moe_lora.serve.openai.parsers.schemas import grammar_of_calls
from moe_lora.serve.openai.structured import forced_functions
from tests.engine.step.test_grammar_masks import random_schema
from tests.small_tokenizers import byte_level

DEMO = Path(__file__).parents[2] / "demo"
OTHER = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"const": "other"}}}
ONE = {"const": 1}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
REFERENCES = {
    "by pointer": {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": ONE}},
    "to definitions": {"properties": {"a": {"$ref": "#/definitions/x"}}, "definitions": {"x": ONE}},
    "to a property": {"properties": {"b": ONE, "a": {"$ref": "#/properties/b"}}},
    "in a chain": {
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"allOf": [{"$ref": "#/$defs/z"}]}, "z": ONE},
    },
    "outside of known keywords": {
        "properties": {"a": {"$ref": "#/components/schemas/x"}},
        "components": {"schemas": {"x": {"$ref": "#/components/schemas/y"}, "y": ONE}},
    },
    "with escapes": {"properties": {"a": {"$ref": "#/$defs/q~1r%20s~0"}}, "$defs": {"q/r s~": ONE}},
    "to an anchor": {"properties": {"a": {"$ref": "#here"}}, "$defs": {"x": {"$anchor": "here", **ONE}}},
    "below an id": {
        "$id": "https://tools.example/args",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": ONE},
    },
    "through an id": {
        "$id": "https://tools.example/args",
        "properties": {"a": {"$ref": "args#/$defs/x"}, "b": {"$ref": "https://tools.example/args#/$defs/x"}},
        "$defs": {"x": ONE},
    },
    "to another id": {
        "$id": "https://tools.example/args",
        "properties": {"a": {"$ref": "other"}},
        "$defs": {"x": {"$id": "other", "$ref": "#/$defs/x", "$defs": {"x": ONE}}},
    },
    "beside an id": {
        "properties": {"a": {"$id": "https://tools.example/a", "$ref": "#/$defs/x", "$defs": {"x": ONE}}},
        "$defs": {"x": {"const": 2}},
    },
    "of draft 7 beside an id": {
        "$schema": DRAFT_7,
        "properties": {"a": {"$id": "https://tools.example/a", "$ref": "#/definitions/x"}},
        "definitions": {"x": ONE},
    },
    "of draft 7 to an id as anchor": {
        "$schema": DRAFT_7,
        "properties": {"a": {"$ref": "#here"}},
        "definitions": {"x": {"$id": "#here", **ONE}},
    },
    "of draft 4": {
        "$schema": DRAFT_4,
        "id": "https://tools.example/args",
        "properties": {"a": {"$ref": "#/definitions/x"}},
        "definitions": {"x": {"enum": [1]}},
    },
    "in names of properties": {
        "properties": {"a": {"properties": {"$ref": {"type": "string"}, "$id": {"type": "integer"}}}}
    },
    "in data": {
        "properties": {"a": {"enum": [{"$ref": "#/nowhere", "$id": "x"}]}, "b": {"const": {"$ref": "#"}}},
        "default": {"$ref": "#/nowhere"},
        "examples": [{"$ref": "#/nowhere"}],
    },
}
VALUES = [
    {"a": 1},
    {"a": 2},
    {"a": "other"},
    {"b": 1},
    {"b": 2},
    {"a": {"$ref": "#/nowhere", "$id": "x"}},
    {"a": {"$ref": "#/items/anyOf/0/properties/arguments/nowhere", "$id": "x"}},
    {"a": {"$ref": "text", "$id": 1}},
    {"a": {"$ref": 1}},
    {"b": {"$ref": "#"}},
]
NOT_ENFORCED = [
    {"uniqueItems": True},
    {"propertyNames": {"pattern": "^a"}},
    {"not": {"required": ["z"]}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False},
    {"$dynamicRef": "#node"},
    {"properties": {"c": {"type": "string", "format": "binary"}}},
    {"properties": {"c": {"type": "string", "pattern": "^(?!a).*$"}}},
    {"properties": {"c": {"type": "string", "pattern": r"\bword\b"}}},
    {"patternProperties": {"^(?!a)": {"type": "string"}}},
    {"properties": {"c": {"$ref": "https://elsewhere.example/schema"}}},
    {"required": None},
]


def tool(parameters: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def grammar_of(*tools: dict[str, Any]) -> str:
    grammar = grammar_of_calls(*forced_functions(list(tools), "required", parallel=True))
    check_grammar(grammar)
    return grammar


@cache
def tokenizers() -> tuple[Tokenizer, Any]:
    """A tokenizer, and the same for grammars."""
    tokenizer = Tokenizer(byte_level(), special_tokens={"eos_token": "</s>"})
    ends = [tokenizer.backend.token_to_id("</s>")]
    return tokenizer, grammar_tokenizer(tokenizer, tokenizer.vocab_size, ends)


def follows(grammar: str, arguments: Any, name: str = "f") -> bool:
    tokenizer, words = tokenizers()
    matcher = LLMatcher(words, grammar, limits=limits())
    text = json.dumps([{"name": name, "arguments": arguments}])
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


@pytest.mark.parametrize("kind", REFERENCES)
def test_references_mean_the_same_beside_other_functions(kind):
    schema = {"type": "object", "additionalProperties": False, **REFERENCES[kind]}
    same_id = {**OTHER, **{key: schema[key] for key in ("$id", "id", "$schema") if key in schema}}
    wanted = [is_valid(value, schema) for value in VALUES]
    assert {True, False} == set(wanted)
    for tools in (
        [tool(schema), tool(same_id, "g")],
        [tool(same_id, "g"), tool(schema, strict=True)],
        [tool(schema), tool(schema, "g")],
    ):
        grammar = grammar_of(*tools)
        assert [follows(grammar, value) for value in VALUES] == wanted
    assert follows(grammar, VALUES[wanted.index(True)], "g")


@pytest.mark.parametrize("more", NOT_ENFORCED, ids=lambda one: str(one)[:30])
def test_keywords_without_an_effect_are_left_out_of_functions_that_are_not_strict(more):
    shared = {"type": "object", "additionalProperties": False, "required": ["a"], "$defs": {"x": ONE}}
    properties = {"a": {"$ref": "#/$defs/x"}, "b": {"type": "string"}, **more.get("properties", {})}
    schema = {**shared, **more, "properties": properties}
    grammar = grammar_of(tool(schema), tool(OTHER, "g", strict=True))
    assert follows(grammar, {"a": 1})
    assert not follows(grammar, {"a": 2})
    assert not follows(grammar, {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="'f'"):
        grammar_of(tool(schema, strict=True), tool(OTHER, "g"))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"$ref": "#/properties/b"}}}, "#/properties/b"),
        ({"properties": {"a": {"$ref": "#/items"}}}, "#/items"),
        ({"properties": {"a": {"$ref": "#b"}}}, "#b"),
        ({"properties": {"a": {"$ref": "#/required/0"}}, "required": ["a"]}, "#/required/0"),
        ({"properties": {"a": {"type": "any"}}}, "any"),
        ({"type": "string"}, "object"),
        ({"type": ["string", "null"]}, "object"),
    ],
    ids=str,
)
def test_a_wrong_schema_is_refused_with_its_cause(schema, words):
    with pytest.raises(ValueError, match=words):
        grammar_of(tool(OTHER, "g"), tool(schema))


def test_arguments_are_an_object_whatever_else_the_schema_allows():
    for schema in (None, {}, {"type": ["object", "null"]}, {"anyOf": [{"type": "object"}, {"type": "null"}]}):
        grammar = grammar_of(tool(schema))
        assert follows(grammar, {})
        assert not follows(grammar, None)


def random_function(rng: random.Random) -> dict[str, Any]:
    """A schema with references, alternatives and keywords without an effect."""
    inner = {f"k{number}": random_schema(rng, 1) for number in range(rng.randint(1, 3))}
    name, found = rng.choice(list(inner.items()))
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "title": "F"}
    if rng.random() < 0.6:
        where = rng.choice(["$defs", "definitions"])
        inner[name] = {"$ref": f"#/{where}/{name}", "description": "d"}
        schema[where] = {name: found}
    if rng.random() < 0.3:
        schema["$id"] = rng.choice(["https://tools.example/a", "a.json"])
    if rng.random() < 0.3:
        inner["choice"] = {"oneOf": [{"const": "a"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
    if rng.random() < 0.3:
        schema["propertyNames"] = {"pattern": "^[a-z]"}
    return {**schema, "properties": inner, "required": rng.sample(list(inner), rng.randint(0, len(inner)))}


@pytest.mark.parametrize("num_answers", [16, pytest.param(1000, marks=pytest.mark.slow)])
def test_forced_calls_of_a_model_without_an_idea_are_valid(num_answers):
    rng = random.Random(11)
    tools = [
        [tool(random_function(rng), name) for name in ("f", "g")[: rng.randint(1, 2)]]
        for _ in range(num_answers)
    ]
    sampling = [
        SamplingParams(grammar=grammar_of(*one), temperature=2.0, max_tokens=250, seed=number)
        for number, one in enumerate(tools)
    ]
    with LLM(str(DEMO / "model"), eager=True, num_threads=1, max_num_seqs=32) as llm:
        answers = llm.generate(["hello"] * num_answers, None, sampling)
    ended = 0
    for one, answer in zip(tools, answers, strict=True):
        if answer.finish_reason == "stop":
            ended += 1
            schemas = {each["function"]["name"]: each["function"]["parameters"] for each in one}
            parsers = AnswerParsers(tool_format="forced", tools=schemas)
            pieces, calls = ParsedChoice(parsers).whole(answer.text)
            assert calls, answer.text
            assert not pieces.content.strip()
            assert len(calls) == len(json.loads(answer.text))
            assert all(is_valid(json.loads(call.arguments), schemas[call.name]) for call in calls)
    assert ended >= 0.7 * num_answers
