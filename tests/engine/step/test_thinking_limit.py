# SPDX-License-Identifier: Apache-2.0
"""The longest reasoning of an answer: the closing mark follows, and the answer goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_lora.core.request import GenerateRequest, SamplingParams, ThinkingLimit
from moe_lora.engine.text.grammars import regex_grammar
from moe_lora.engine.text.text import load_tokenizer

from .test_grammar_rows import CONFIG, PROMPT, core, step  # noqa: F401  (the fixture)

CLOSING = (50, 51, 52)
NUM_TOKENS = 12
SAMPLING: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True}

QUICK = ((True, 0), (False, 1), (True, 5))


def answer(engine, generated: tuple[int, ...] = (), **sampling: Any) -> list[int]:
    params = SamplingParams(**{**SAMPLING, **sampling})
    request = GenerateRequest(request_id="one", prompt_token_ids=PROMPT, sampling=params, generated=generated)
    engine.add_request(request)
    answers: dict[str, list[int]] = {}
    step(engine, answers)
    return answers["one"]


@pytest.mark.parametrize(
    ("is_open", "num_tokens"),
    [
        pytest.param(is_open, num, marks=() if (is_open, num) in QUICK else pytest.mark.slow)
        for is_open in (True, False)
        for num in (0, 1, 5)
    ],
)
def test_the_closing_mark_follows_the_last_token(core, is_open, num_tokens):  # noqa: F811
    plain = answer(core)
    opening = () if is_open else tuple(plain[1:3])  # after a gap
    start = 0 if is_open else 3
    limit = ThinkingLimit(num_tokens, opening, CLOSING)
    found = answer(core, thinking=limit)
    end = start + num_tokens
    assert found[:end] == plain[:end]
    assert tuple(found[end : end + 3]) == CLOSING
    known = tuple(found[: end + 3])
    assert found == list(known) + answer(core, known)[: NUM_TOKENS - len(known)]
    for cut in range(1, end + 4):
        assert found[cut:] == answer(core, tuple(found[:cut]), thinking=limit), "a moved request goes on"


def test_a_reasoning_that_ends_by_itself_is_left_alone(core):  # noqa: F811
    plain = answer(core)
    for limit in (
        ThinkingLimit(6, (), tuple(plain[2:4])),
        ThinkingLimit(2, (126, 125), CLOSING),  # never opened
        ThinkingLimit(NUM_TOKENS, (), CLOSING),
    ):
        assert answer(core, thinking=limit) == plain


def test_a_begun_mark_is_completed(core):  # noqa: F811
    plain = answer(core)
    assert plain[2] != plain[3] or plain[1] != plain[2]
    found = answer(core, thinking=ThinkingLimit(3, (), (*plain[1:3], 51)))
    assert found[:4] == [*plain[:3], 51]


def test_rows_beside_it_and_other_edits_keep_their_tokens(core):  # noqa: F811
    plain = answer(core)
    params = SamplingParams(**SAMPLING)
    limited = replace(params, thinking=ThinkingLimit(2, (), CLOSING), min_tokens=NUM_TOKENS)
    for name, one in (("plain", params), ("limited", limited)):
        core.add_request(GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=one))
    answers: dict[str, list[int]] = {}
    step(core, answers)
    assert answers["plain"] == plain
    assert tuple(answers["limited"][2:5]) == CLOSING


@pytest.mark.parametrize(("text", "is_late"), [("abx", False), ("abcdx", False), ("abcdex", True)])
def test_the_mark_waits_for_the_end_of_a_character(core, text, is_late):  # noqa: F811
    """A grammar lets no mark begin within a character of up to four bytes; here, of four letters."""
    tokenizer = load_tokenizer(CONFIG.model_dir)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    limit = ThinkingLimit(1, (), (tokens[-1],))
    sampling = {"max_tokens": 20, "ignore_eos": False, "grammar": regex_grammar(text), "thinking": limit}
    if is_late:
        assert answer(core, **sampling)[:-1] == tokens[:4]
        return
    found = answer(core, **sampling)
    assert found[: len(tokens)] == tokens
    for cut in range(1, len(tokens)):
        assert found[cut:] == answer(core, tuple(tokens[:cut]), **sampling), "a moved request goes on"


def test_a_grammar_that_excludes_the_mark_is_the_client_s_error(core):  # noqa: F811
    params = SamplingParams(max_tokens=8, grammar=regex_grammar("a{8}"), thinking=ThinkingLimit(2, (), (5,)))
    core.add_request(GenerateRequest(request_id="one", prompt_token_ids=PROMPT, sampling=params))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert outputs[-1].finish_reason == "error"
    assert "exclude every token" in outputs[-1].error


def test_a_closing_mark_outside_the_vocabulary_is_refused_by_name(core):  # noqa: F811
    with pytest.raises(ValueError, match=r"^thinking has token id 9999, outside the vocabulary of"):
        answer(core, thinking=ThinkingLimit(2, (), (9999,)))
