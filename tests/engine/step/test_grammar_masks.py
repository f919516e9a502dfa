# SPDX-License-Identifier: Apache-2.0
"""Answers within a grammar, of models without an idea: the demo model, hot."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from moe_lora import LLM, GenerationError, SamplingParams
from moe_lora.core.request import GenerateRequest
from moe_lora.engine.step.grammar_masks import Follower, Grammars, bits_of, sole_token
from moe_lora.engine.text.grammars import (
    choice_grammar,
    grammar_tokenizer,
    json_grammar,
    matcher_of,
    regex_grammar,
    text_grammar,
)
from tests.grids import with_quick
from tests.patience import PATIENCE_S
from tests.small_tokenizers import byte_level, wrapped

DEMO = Path(__file__).parents[3] / "demo"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}}


@pytest.fixture(scope="module", params=with_quick(("off", "on"), ("on",)))
def llm(request) -> Iterator[LLM]:
    adapters = {"upper": str(DEMO / "adapters" / "upper")}
    settings = {"eager": True, "num_threads": 1, "max_num_seqs": 32, "async_scheduling": request.param}
    with LLM(str(DEMO / "model"), adapters=adapters, **settings) as engine:
        yield engine


def hot(grammar: str, **sampling: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": grammar, "temperature": 2.0, "max_tokens": 60, "seed": 1, **sampling})


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Any of the common keywords, bounded so that most answers are short."""
    kind = rng.choice(
        ["integer", "boolean", "null", "enum", "string", "pattern", "number", *["tree"] * 3 * depth]
    )
    if kind == "tree":
        inner = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.4:
            low = rng.randint(0, 2)
            return {"type": "array", "items": inner[0], "minItems": low, "maxItems": low + rng.randint(0, 2)}
        if rng.random() < 0.3:
            return {"anyOf": inner}
        names = [f"k{number}" for number in range(len(inner))]
        required = [name for name in names if rng.random() < 0.7]
        closed = {"properties": dict(zip(names, inner, strict=True)), "additionalProperties": False}
        return {"type": "object", "required": required, **closed}
    low = rng.randint(-20, 20)
    return {
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
        "number": {"type": "number", "exclusiveMinimum": low, "maximum": low + 3},
        "string": {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-f]{2}$", "^(x|yz)+q$", "^a?b*$"])},
        "enum": {"enum": [rng.choice(["red", 7, None, True, 1.5]), "blue"]},
    }.get(kind, {"type": kind})


@pytest.mark.parametrize("num_schemas", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_that_end_are_valid_under_random_schemas(num_schemas, llm):
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    sampling = [hot(json_grammar(one), seed=number, max_tokens=150) for number, one in enumerate(schemas)]
    adapters = [rng.choice([None, "upper"]) for _ in schemas]
    answers = llm.generate(["hello"] * num_schemas, adapters, sampling)
    ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(answer.text), schema)
    assert ended >= 0.8 * num_schemas


def test_regex_choice_and_grammars_hold(llm):
    lark, gbnf = 'start: "<" DIGIT+ ">"\nDIGIT: /[0-9]/', 'root ::= "<" [0-9]+ ">"'
    made = [
        regex_grammar("[a-c]{3}-[xy]"),
        choice_grammar(["red", "green"]),
        *map(text_grammar, (lark, gbnf)),
    ]
    patterns = ["[a-c]{3}-[xy]", "red|green", "<[0-9]+>", "<[0-9]+>"]
    for answer, pattern in zip(
        llm.generate(["hello"] * 4, None, list(map(hot, made))), patterns, strict=True
    ):
        assert answer.finish_reason == "length" or re.fullmatch(pattern, answer.text), answer.text


def test_a_complete_answer_ends_and_repeats_its_end_below_min_tokens(llm):
    fixed = regex_grammar("abc")
    plain, long, endless = llm.generate(
        ["hello"] * 3, None, [hot(fixed), hot(fixed, min_tokens=8), hot(fixed, ignore_eos=True, max_tokens=9)]
    )
    assert [one.text for one in (plain, long, endless)] == ["abc"] * 3
    assert [one.finish_reason for one in (plain, long, endless)] == ["stop", "stop", "length"]
    assert [len(one.token_ids) for one in (plain, long, endless)] == [4, 8, 9]


def test_a_stop_token_ends_a_complete_answer(llm):
    [z] = llm.tokenizer.encode("z", add_special_tokens=False)
    [answer] = llm.generate("hello", None, hot(regex_grammar("abc"), stop_token_ids=(z,), ignore_eos=True))
    assert (answer.text, answer.token_ids[-1], answer.finish_reason) == ("abc", z, "stop")


def test_reports_are_of_the_model_and_others_are_left_alone(llm):
    free = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    [alone] = llm.generate("hello", "upper", free)
    beside, within = llm.generate(["hello"] * 2, "upper", [free, hot(json_grammar(SCHEMA), logprobs=2)])
    assert beside == alone
    assert within.logprobs[0].top == alone.logprobs[0].top
    assert len(within.logprobs) == len(within.token_ids)


def test_an_answer_goes_on_elsewhere_within_its_grammar(llm):
    """The state comes from the tokens, as after the end of an instance."""
    sampling = hot(json_grammar({**SCHEMA, "required": ["a", "b"]}), seed=5)
    [whole] = llm.generate("hello", None, sampling)
    cuts = range(1, len(whole.token_ids))
    outputs: dict[int, SimpleQueue[Any]] = {cut: SimpleQueue() for cut in cuts}
    for cut in cuts:
        request = GenerateRequest(
            request_id=f"cut-{cut}",
            prompt_token_ids=whole.prompt_token_ids,
            sampling=sampling,
            generated=whole.token_ids[:cut],
        )
        llm.client.submit(request, outputs[cut].put)
    for cut in cuts:
        tokens, is_over = whole.token_ids[:cut], False
        while not is_over:
            output = outputs[cut].get(timeout=PATIENCE_S)
            tokens, is_over = (*tokens, *output.token_ids), output.finish_reason is not None
        assert tokens == whole.token_ids


TEXTS_WITH_SPECIAL_TOKENS = [
    regex_grammar("a<s>b</s>(<pad>)?"),
    choice_grammar(["<unk>", "<pad>"]),
    json_grammar({"const": {"a": "<s> or </s>"}}),
    json_grammar({"type": "object", "properties": {"<s>": {"enum": ["</s>"]}}, "required": ["<s>"]}),
    text_grammar('start: "x</s>" /[ab]/'),
]


def test_text_that_reads_as_a_special_token_is_spelled(llm):
    answers = llm.generate(["hello"] * 5, None, [hot(one) for one in TEXTS_WITH_SPECIAL_TOKENS])
    assert [one.finish_reason for one in answers] == ["stop"] * 5
    patterns = ["a<s>b</s>(<pad>)?", "<unk>|<pad>", r"\{.*<s> or </s>.*\}", r"\{.*<s>.*</s>.*\}", "x</s>[ab]"]
    for answer, pattern in zip(answers, patterns, strict=True):
        assert re.fullmatch(pattern, answer.text, re.DOTALL)
        assert not set(answer.token_ids[:-1]) & llm.tokenizer.special_ids


def test_forced_text_with_an_added_token_is_spelled_by_plain_tokens():
    """Also with an added token for a part of a longer token's bytes, and the end as text."""
    tokenizer = wrapped(byte_level())
    added = ["<think>", "</think>", "the", "\u00e9"]
    tokenizer.backend.add_tokens(added)
    size, eos = tokenizer.vocab_size, tokenizer.eos_token_ids
    masks = grammar_tokenizer(tokenizer, size, eos)
    whole = "\u00e9<think>\nthe</s></think>\nthe \u00e9 fox"
    grammar = regex_grammar(whole)
    follower = Follower(matcher_of(grammar, masks), masks, eos, eos, size)
    tokens: list[int] = []
    while not tokens or tokens[-1] not in eos:
        mask = follower.advance(tokens[-1:])
        assert mask.problem is None
        found = sole_token(mask.words)
        tokens.append(next(one for one in range(size) if mask.words[one // 32] >> one % 32 & 1))
        assert found in (None, tokens[-1])
    text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
    assert text == whole


@pytest.mark.parametrize(("spelling", "found"), [([5, 6], 5), ([7, 6], None)])
def test_forced_text_starts_with_the_first_accepted_token_of_a_whole_character(spelling, found):
    matcher = SimpleNamespace(
        is_accepting=lambda: False,
        is_stopped=lambda: False,
        is_error=lambda: False,
        get_error=lambda: "",
        compute_bitmask=lambda: bits_of((3,), 32).tobytes(),
        compute_ff_bytes="\u65e5\u672c".encode,
        validate_tokens=lambda tokens: int(tokens == [5]),
    )
    tokenizer = SimpleNamespace(tokenize_bytes={"\u65e5".encode(): spelling, b"\xe6": [9]}.__getitem__)
    mask = Follower(matcher, tokenizer, (), (), 32).advance(())  # type: ignore[arg-type]
    assert (sole_token(mask.words), mask.problem is None) == (found, found is not None)


def test_a_grammar_that_the_vocabulary_cannot_spell_ends_its_request_alone(llm):
    sampling = [hot(regex_grammar("ab\u65e5")), hot(regex_grammar("abc"))]
    with pytest.raises(GenerationError, match="no token can follow") as caught:
        llm.generate(["hello"] * 2, None, sampling)
    assert caught.value.completions[1].text == "abc"


def test_a_grammar_that_does_not_compile_is_refused(llm):
    with pytest.raises(ValueError, match="can't be compiled"):
        llm.generate("hello", None, hot("start: nothing"))
    request = GenerateRequest(request_id="bad", prompt_token_ids=(5,), sampling=hot("start: nothing"))
    with pytest.raises(ValueError, match="can't be compiled"):
        llm.client.core.sampler.grammars.sequence(request, None, 0.0, 50, None)


def test_a_passing_error_of_a_compilation_is_not_kept(llm, monkeypatch):
    compile_now, tries = Grammars._compile, []

    def fail_once(self: Grammars, grammar: str) -> LLMatcher:
        tries.append(grammar)
        if len(tries) == 1:
            raise OSError(24, "Too many open files")
        return compile_now(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", fail_once)
    sampling = hot(choice_grammar(["once", "twice"]))
    with pytest.raises(ValueError, match="Too many open files"):
        llm.generate("hello", None, sampling)
    assert llm.generate("hello", None, sampling)[0].text in ("once", "twice")
    llm.generate("hello", None, sampling)
    assert len(tries) == 2
