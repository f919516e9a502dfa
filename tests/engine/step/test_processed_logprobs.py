# SPDX-License-Identifier: Apache-2.0
"""Log probabilities for trainers equal transformers' processors, and seeds give equal tokens in any batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from moe_lora import LLM, SamplingParams
from moe_lora.engine.text.grammars import regex_grammar
from moe_lora.engine.text.text import load_tokenizer
from tests.grids import diagonal, with_quick
from tests.oracle import reference_logits

DEMO = Path(__file__).parents[3] / "demo"
UPPER = str(DEMO / "adapters" / "upper")
PROMPT = (1, *range(40, 57))
NUM = 12
END = 2
LETTERS = tuple(load_tokenizer(DEMO / "model").encode("abcdefghij", add_special_tokens=False))
GRAMMAR = regex_grammar("[a-j]{100}")
SETTINGS = {
    "temperature": {"temperature": 1.7},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.7},
    "min_p": {"temperature": 2.0, "min_p": 0.1},
    "repetition": {"temperature": 1.2, "repetition_penalty": 1.4},
    "all": {"temperature": 1.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3},
    "occurrences": {"temperature": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "bias": {"temperature": 1.4, "logit_bias": {7: 3.0, 41: -2.0, 50: 2.5}},
    "allowed": {"temperature": 2.0, "allowed_token_ids": (3, 7, 40, 41, 50, 60)},
    "excluded": {"temperature": 1.7, "bad_word_ids": ((40,), (41,), (50, 51))},
    "ends": {"temperature": 3.0, "min_tokens": NUM, "ignore_eos": False},
    "grammar": {"temperature": 3.0, "grammar": GRAMMAR},
    "masks and cuts": {"temperature": 2.0, "top_k": 3, "allowed_token_ids": (3, 7, 40, 41, 50, 60)},
}


def sampled(**more) -> SamplingParams:
    fields = {"max_tokens": NUM, "ignore_eos": True, "seed": 11, "logprobs": 0, **more}
    return SamplingParams(processed_logprobs=True, **fields)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {"eager": True, "num_threads": 1, "max_num_seqs": 32, "dtype": "float32"}
    with LLM(str(DEMO / "model"), adapters={"upper": UPPER}, **settings) as engine:
        yield engine


def processors(sampling: SamplingParams) -> transformers.LogitsProcessorList:
    found = transformers.LogitsProcessorList()
    allowed = LETTERS if sampling.grammar else sampling.allowed_token_ids
    if allowed is not None:
        found.append(transformers.PrefixConstrainedLogitsProcessor(lambda batch, ids: [*allowed], 1))
    if words := [[*one] for one in sampling.bad_word_ids]:
        found.append(transformers.NoBadWordsLogitsProcessor(words, END))
    if sampling.min_tokens:
        words = len(PROMPT), sampling.min_tokens, END
        found.append(transformers.MinNewTokensLengthLogitsProcessor(*words))
    if sampling.logit_bias:
        bias = {(token,): value for token, value in sampling.logit_bias.items()}
        found.append(transformers.SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1:
        found.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature:
        found.append(transformers.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(transformers.MinPLogitsWarper(sampling.min_p))
    return found


def expected(sampling: SamplingParams, tokens: tuple[int, ...], adapter: str | None) -> list[float]:
    """Of each answer token: transformers' processors over the reference's logits."""
    logits = reference_logits(str(DEMO / "model"), UPPER if adapter else None, [*PROMPT, *tokens[:-1]])
    scores = []
    for number, token in enumerate(tokens):
        row = logits[len(PROMPT) - 1 + number].float()[None].clone()
        for other in set(tokens[:number]):  # vLLM's, unknown to transformers
            row[0, other] -= sampling.presence_penalty + sampling.frequency_penalty * tokens[:number].count(
                other
            )
        known = torch.tensor([[*PROMPT, *tokens[:number]]])
        scores.append(torch.log_softmax(processors(sampling)(known, row), dim=-1)[0, token].item())
    return scores


@pytest.mark.parametrize(("name", "adapter"), diagonal(list(SETTINGS), [None, "upper"]))
def test_processed_values_equal_transformers(llm, name, adapter):
    sampling = sampled(**SETTINGS[name])
    [found] = llm.generate([PROMPT], adapter, sampling)
    processed = [one.processed for one in found.logprobs or ()]
    assert processed == pytest.approx(expected(sampling, found.token_ids, adapter), abs=1e-4)
    if name != "greedy":
        raw = [one.logprob for one in found.logprobs or ()]
        assert raw != pytest.approx(processed, abs=1e-3), "both are given, and differ"


def test_a_seed_gives_equal_tokens_and_values_in_any_batch(llm):
    each = [sampled(**fields) for fields in SETTINGS.values()]
    alone = [llm.generate([PROMPT], "upper", sampling)[0] for sampling in each]
    fillers = [replace(sampling, seed=100 + i) for i, sampling in enumerate(each)]
    mixed = llm.generate(
        [PROMPT] * 2 * len(each), ["upper"] * len(each) + [None] * len(each), [*each, *fillers]
    )
    assert [one.token_ids for one in mixed[: len(each)]] == [one.token_ids for one in alone]
    for one, other in zip(mixed, alone, strict=False):
        found, before = ([value.processed for value in of.logprobs or ()] for of in (one, other))
        assert found == pytest.approx(before, abs=1e-5)


def test_rows_without_the_report_have_none(llm):
    plain = replace(sampled(temperature=1.0), processed_logprobs=False)
    found = llm.generate([PROMPT] * 2, None, [plain, sampled(temperature=1.0)])
    assert {one.processed for one in found[0].logprobs or ()} == {None}
    assert None not in {one.processed for one in found[1].logprobs or ()}


@pytest.mark.parametrize("name", with_quick(SETTINGS, ("all", "greedy", "grammar", "masks and cuts")))
def test_alone_they_stand_in_place_of_raw_values_for_the_likeliest_too(llm, name):
    beside = sampled(**SETTINGS[name])
    alone = replace(beside, processed_logprobs="alone", logprobs=4)
    raw = replace(beside, processed_logprobs=False, logprobs=4)
    of_alone, of_beside, of_raw = llm.generate([PROMPT] * 3, "upper", [alone, beside, raw])
    processed = [one.processed for one in of_beside.logprobs or ()]
    assert [one.logprob for one in of_alone.logprobs or ()] == pytest.approx(processed, abs=1e-5)
    assert [one.logprob for one in of_raw.logprobs or ()] == pytest.approx(
        [one.logprob for one in of_beside.logprobs or ()], abs=1e-5
    )
    for token, one in zip(of_alone.token_ids, of_alone.logprobs or (), strict=True):
        values = [value for _, value in one.top]
        assert values == sorted(values, reverse=True)
        assert dict(one.top).get(token, one.logprob) == one.logprob
        if alone.top_k == 3:
            assert sum(math.exp(value) for value in values) == pytest.approx(1.0, abs=1e-5)


def test_the_report_needs_logprobs():
    with pytest.raises(ValueError, match=r"processed_logprobs=True is not allowed.* without logprobs"):
        SamplingParams(processed_logprobs=True)
