# SPDX-License-Identifier: Apache-2.0
"""Tokens of log probabilities in each kind of vocabulary."""

from __future__ import annotations

import pytest

from moe_lora.core.request import TokenLogprobs
from moe_lora.serve.openai.endpoints import ChatFormat, CompletionFormat
from tests.small_tokenizers import byte_fallback, byte_level, wrapped

LLAMA, GPT = wrapped(byte_fallback()), wrapped(byte_level())
WORDS = [LLAMA.backend.token_to_id(one) for one in ("▁the", "▁quick", "▁fox")]
CJK = "日本 é"
PARTS = {
    "bytes": (GPT, GPT.encode(CJK, add_special_tokens=False)),
    "fallback": (LLAMA, [3 + byte for byte in CJK.encode()]),
}


def completion(tokenizer, token_ids, *, logprob=-0.1, top=()):
    form = CompletionFormat(tokenizer, with_token_ids=False)
    return form.logprobs(0, token_ids, [TokenLogprobs(logprob, 1, top)] * len(token_ids))


def chat(tokenizer, token_ids, top=()):
    form = ChatFormat(tokenizer, with_token_ids=False)
    found = [form.logprobs(0, [one], [TokenLogprobs(-0.1, 1, top)]) for one in token_ids]
    return [entry for one in found for entry in one["content"]]


def test_a_word_with_a_space_is_another_token_than_the_word():
    drawn, likeliest = LLAMA.backend.token_to_id("the"), WORDS[0]
    found = completion(LLAMA, [drawn], logprob=-3.0, top=((likeliest, -0.05),))
    assert found["tokens"] == ["the"]
    assert found["top_logprobs"] == [{"the": -3.0, " the": -0.05}]


def test_of_tokens_with_one_text_the_likeliest_stays():
    drawn, likeliest = GPT.vocab_size + 5, GPT.vocab_size + 6
    [found] = completion(GPT, [drawn], logprob=-3.0, top=((likeliest, -0.05),))["top_logprobs"]
    assert found == {"": -0.05}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_characters_are_named_by_their_bytes(kind):
    tokenizer, token_ids = PARTS[kind]
    drawn, likeliest = (tokenizer.backend.token_to_id(one) for one in ("æ", "ç"))
    if kind == "fallback":
        drawn, likeliest = 3 + 0xE6, 3 + 0xE7
    found = completion(tokenizer, [drawn], logprob=-3.0, top=((likeliest, -0.05),))
    assert found["tokens"] == ["bytes:\\xe6"]
    assert found["top_logprobs"] == [{"bytes:\\xe6": -3.0, "bytes:\\xe7": -0.05}]
    assert "\ufffd" not in "".join(completion(tokenizer, token_ids)["tokens"])


def test_tokens_of_an_answer_join_to_its_text():
    found = completion(LLAMA, WORDS)
    assert (found["tokens"], found["text_offset"]) == ([" the", " quick", " fox"], [0, 4, 10])
    assert "".join(entry["token"] for entry in chat(LLAMA, WORDS)) == LLAMA.decode(WORDS) == "the quick fox"


@pytest.mark.parametrize("kind", PARTS)
def test_bytes_of_tokens_join_to_the_text_s_bytes(kind):
    tokenizer, token_ids = PARTS[kind]
    entries = chat(tokenizer, token_ids, top=((token_ids[0], -0.2),))
    assert any("\ufffd" in entry["token"] for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == CJK.encode()
    assert {bytes(entry["top_logprobs"][0]["bytes"]) for entry in entries} == {bytes(entries[0]["bytes"])}


def test_special_tokens_and_unknown_ids_keep_their_texts():
    assert completion(LLAMA, [2])["tokens"] == completion(GPT, [1])["tokens"] == ["</s>"]
    assert completion(GPT, [GPT.vocab_size + 5])["tokens"] == [""]
