# SPDX-License-Identifier: Apache-2.0
"""Edits of logits against transformers' processors, and against the formula elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.sequence import Sequence
from moe_lora.engine.step.logit_edits import EditedSequence, edit_logits
from moe_lora.engine.step.sampler import sample

VOCAB = 40
PROMPT = (5, 6, 7, 5)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param)


def edited(*answer: int, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=None, **sampling)
    request = GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling=params, generated=answer)
    return (EditedSequence if params.edits_logits else Sequence)(request, None, 0.0, 10_000, None)


def logits(num: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def edit(device: torch.device, given: torch.Tensor, *sequences: Sequence) -> torch.Tensor:
    found = given.to(device, copy=True)
    edit_logits(found, sequences, (3,))
    return found.cpu()


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30).map(tuple)


@settings(deadline=None)
@given(answer=TOKENS, penalty=st.floats(0.1, 3.0), seed=st.integers(0, 99))
def test_repetition_penalty_is_transformers(answer, penalty, seed):
    given_logits = logits(seed=seed)
    found = edit(torch.device("cpu"), given_logits, edited(*answer, repetition_penalty=penalty))
    ids = torch.tensor([[*PROMPT, *answer]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, given_logits.clone())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


WORDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(answer=st.lists(st.integers(0, 5), max_size=9).map(tuple), words=WORDS)
def test_bad_words_are_transformers_over_the_answer(answer, words):
    found = edit(torch.device("cpu"), logits(), edited(*answer, bad_word_ids=tuple(words)))
    processor = NoBadWordsLogitsProcessor([list(word) for word in dict.fromkeys(words)])
    expected = processor(torch.tensor([answer], dtype=torch.int64), logits())
    assert found.isinf().equal(expected.isinf())
    assert found[~found.isinf()].equal(logits()[~found.isinf()])


def test_bias_and_allowed_tokens_are_transformers(device):
    bias = {3: 2.5, 17: -1.25, 39: 100.0}
    allowed = (3, 17, 20)
    found = edit(device, logits(2), edited(logit_bias=bias), edited(allowed_token_ids=allowed))
    ids = torch.tensor([PROMPT])
    by_bias = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    assert found[:1].equal(by_bias(ids, logits(2)[:1]))
    others = [token for token in range(VOCAB) if token not in allowed]
    assert found[1:].equal(SuppressTokensLogitsProcessor(others)(ids, logits(2)[1:]))


def test_penalties_of_the_answer_are_the_formula(device):
    """The row beside has none of them."""
    answer, one = (8, 8, 5, 8, 9), edited(8, 8, 5, 8, 9, frequency_penalty=0.3, presence_penalty=-0.7)
    expected = logits(2)
    for token in set(answer):
        expected[0, token] -= 0.3 * answer.count(token) - 0.7
    torch.testing.assert_close(edit(device, logits(2), one, edited()), expected)


def test_order_is_allowed_bad_ends_bias_penalties(device):
    """A bias moves no forbidden token, and penalties scale biased logits."""
    sampling = {"min_tokens": 9, "logit_bias": {5: 3.0, 3: 50.0, 8: 50.0}, "repetition_penalty": 2.0}
    one = edited(8, bad_word_ids=((8,),), allowed_token_ids=(3, 5, 8, 9), presence_penalty=0.5, **sampling)
    found = edit(device, torch.ones(1, VOCAB), one)[0]
    assert found[[3, 8, 10]].tolist() == [-float("inf")] * 3
    assert found[[5, 9]].tolist() == [2.0, 1.0]


def test_edits_follow_the_tokens_and_are_rebuilt_elsewhere(device):
    """Step by step as at once from the tokens, as after a move or a restart."""
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "bad_word_ids": ((4, 6), (2,))}
    whole, answer = edited(**params), []
    for step in range(12):
        [token], _ = sample(logits(seed=step), [whole], (), edit_logits).read()
        answer.append(token)
        whole.append(token, 0.0, ())
        again = edited(*answer, **params)
        assert edit(device, logits(seed=99), whole).equal(edit(torch.device("cpu"), logits(seed=99), again))


def test_reports_are_of_the_model_and_may_be_of_all_tokens():
    one = edited(8, logprobs=-1, logit_bias={7: 100.0})
    [token], [report] = sample(logits(), [one], (), edit_logits).read()
    assert token == 7
    assert report.logprob == pytest.approx(torch.log_softmax(logits(), -1)[0, 7].item())
    assert sorted(other for other, _ in report.top) == list(range(VOCAB))


@pytest.mark.parametrize(
    ("name", "value"),
    [("frequency_penalty", 2.1), ("presence_penalty", float("nan")), ("repetition_penalty", 0.0),
     ("repetition_penalty", 1e-40), ("repetition_penalty", float("inf")), ("logit_bias", {1: 101.0}),
     ("logit_bias", {1: float("nan")}),
     ("allowed_token_ids", ()), ("bad_words", ("",)), ("bad_word_ids", ((),)), ("logprobs", -2)],
)  # fmt: skip
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
