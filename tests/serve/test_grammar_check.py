# SPDX-License-Identifier: Apache-2.0
"""Grammars are compiled in a child within limits, and may begin after the reasoning."""

from __future__ import annotations

import subprocess
import sys

import pytest
from llguidance import LLMatcher

from moe_lora.engine.text.grammars import after, choice_grammar, grammar_tokenizer, json_grammar, limits
from moe_lora.engine.text.text import Tokenizer
from moe_lora.serve.openai.parsers.choice import AnswerParsers
from moe_lora.serve.openai.parsers.thinking import REASONING_FORMATS
from moe_lora.serve.openai.structured import reasoning_rules
from tests.grids import diagonal
from tests.patience import PATIENCE_S
from tests.small_tokenizers import byte_level

RUN = """
import os, sys
from moe_lora.serve.openai.structured import in_child
def endless():
    while True: pass
def nested():
    raise ValueError("not this")
work = {"text": lambda: "start: é", "memory": lambda: str(len(bytearray(1 << 30))), "endless": endless,
        "abort": os.abort, "nested": nested}
for name in sys.argv[1:]:
    try:
        print(in_child(work[name]))
    except ValueError as error:
        print("refused:", error)
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("no child")
"""
SAID = {
    "text": "start: é",
    "nested": "refused: not this",
    "memory": "refused: the grammar takes more than",
    "endless": "refused: the grammar takes more than",
    "abort": "refused: the grammar takes more than",
}


def test_a_child_answers_or_is_refused_and_ends():
    command = [sys.executable, "-c", RUN, *SAID]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    answers = done.stdout.split("no child\n")
    assert answers.pop() == ""
    for answer, said in zip(answers, SAID.values(), strict=True):
        assert answer.startswith(said)
    assert done.stderr == ""


def tokenizer_with(marks: list[str], *, special: bool | None) -> Tokenizer:
    backend = byte_level()
    if special is not None:
        (backend.add_special_tokens if special else backend.add_tokens)(marks)
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


def follows(tokenizer: Tokenizer, grammar: str, text: str) -> str:
    """Is the text "wrong", a "start" or "whole"?"""
    ends = [tokenizer.backend.token_to_id("</s>")]
    matcher = LLMatcher(grammar_tokenizer(tokenizer, tokenizer.vocab_size, ends), grammar, limits=limits())
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.consume_token(token):
            return "wrong"
    return "whole" if matcher.is_accepting() else "start"


GRAMMARS = [choice_grammar(['{"a": 1}', "no"]), json_grammar({"type": "object", "required": ["a"]})]


@pytest.mark.parametrize(
    ("name", "grammar", "special"), diagonal([*REASONING_FORMATS], GRAMMARS, [None, False, True])
)
def test_a_grammar_begins_after_the_reasoning(name, grammar, special):
    opening, closing = REASONING_FORMATS[name][:2]
    tokenizer = tokenizer_with([opening, closing], special=special)
    both = {
        is_open: after(reasoning_rules(AnswerParsers(reasoning=name, is_open=is_open), tokenizer), grammar)
        for is_open in (False, True)
    }
    answer = '{"a": 1}'
    for text in (f"why? {{{closing}{answer}", f"a\nb{closing}\n\n{answer}", f"{closing}\n{answer}"):
        assert follows(tokenizer, both[True], text) == "whole"
        assert follows(tokenizer, both[True], text[:-1]) == "start"
        assert follows(tokenizer, both[False], opening + text) == "whole"
        assert follows(tokenizer, both[True], f"{text}x") == "wrong"
    assert follows(tokenizer, both[True], f"why{closing}maybe") == "wrong"
    assert follows(tokenizer, both[True], answer) == "start", "still reasoning"
    assert follows(tokenizer, both[False], answer) == "whole"
    assert follows(tokenizer, both[False], "maybe") == "wrong"


def test_a_closed_reasoning_needs_no_rules():
    closed = AnswerParsers(reasoning="qwen3", is_closed=True)
    assert reasoning_rules(closed, tokenizer_with([], special=False)) == ""
    assert after("", "start: X") == "start: X"


@pytest.mark.parametrize("special", [None, False, True], ids=["text", "added", "special"])
def test_channels_come_before_the_final_one(special):
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer = tokenizer_with(marks, special=special)
    parsers = AnswerParsers(reasoning="harmony", tool_format="harmony")
    grammar = after(reasoning_rules(parsers, tokenizer), GRAMMARS[0])
    analysis = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    for before in ("", analysis, 2 * analysis):
        assert follows(tokenizer, grammar, f"{before}{final}no") == "whole"
        assert follows(tokenizer, grammar, f"{before}{final}yes") == "wrong"
    assert follows(tokenizer, grammar, "no") == "wrong"
