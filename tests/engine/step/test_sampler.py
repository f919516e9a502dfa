# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.sequence import Sequence
from moe_lora.engine.step import sampler
from moe_lora.engine.step.sampler import sample, truncated_probabilities

EOS = (3,)


def sampled(*given):
    """Tokens and reports."""
    return sample(*given).read()


def sequence(**sampling: object) -> Sequence:
    params = SamplingParams(**sampling)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=params)
    return Sequence(request, None, 0.0, 10_000, None if params.greedy else params.seed or 0)


def test_greedy_takes_the_likeliest_token():
    tokens, _ = sampled(torch.tensor([[0.0, 2.0, 1.0, 0.0]]), [sequence(temperature=0.0)], EOS)
    assert tokens == [1]


@pytest.mark.parametrize(
    ("params", "kept"),
    [({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0, 1}), ({"min_p": 0.5}, {0, 1}), ({}, {0, 1, 2, 3})],
)
def test_truncation_keeps_only_allowed_tokens(params, kept):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = truncated_probabilities(logits, [SamplingParams(**params)])
    assert {i for i, p in enumerate(probs[0].tolist()) if p > 0} == kept


def test_equal_tokens_are_reported_alike_whatever_others_ask_for():
    logits = torch.zeros(2, 1000)
    few, many = (sequence(temperature=0.0, logprobs=num) for num in (2, 20))
    _, [alone] = sampled(logits[:1], [few], EOS)
    _, [beside, _] = sampled(logits, [few, many], EOS)
    assert alone == beside


def test_the_whole_vocabulary_of_one_row_is_of_no_other_row(monkeypatch):
    seen, copied, topk = [], [], torch.Tensor.topk

    def noted(values: torch.Tensor, num: int) -> object:
        seen.append((*values.shape, num))
        return topk(values, num)

    class Copy(sampler.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            copied.append(tensor.nbytes)
            super().__init__(tensor)

    monkeypatch.setattr(torch.Tensor, "topk", noted)
    monkeypatch.setattr(sampler, "HostCopy", Copy)
    rows = [sequence(temperature=0.0, logprobs=-1 if row == 3 else row % 2) for row in range(8)]
    _, found = sampled(torch.randn(8, 1000), rows, EOS)
    assert [len(one.top) for one in found] == [0, 1, 0, 1000, 0, 1, 0, 1]
    assert sorted(seen) == [(1, 1000, 1000), (3, 1000, 1), (4, 1000, 0)]
    assert sum(copied) < 10 * 1000


def test_numbers_of_a_whole_vocabulary_are_made_by_the_reader():
    """The engine's thread, for which all streams wait, makes none."""
    logits = torch.randperm(1000)[None] / 100  # no ties
    _, [report] = sampled(logits.clone(), [sequence(temperature=0.0, logprobs=-1)], EOS)
    assert len(report.likeliest) == 8 * 1000
    assert isinstance(report.likeliest, bytes)
    values, ids = torch.log_softmax(logits, dim=-1)[0].sort(descending=True)
    assert report.top == tuple(zip(ids.tolist(), values.tolist(), strict=True))


def test_settings_beyond_the_vocabulary_mean_all_of_it():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = truncated_probabilities(logits, [SamplingParams(top_k=10**40)])
    assert (probs > 0).all()
    _, [report] = sampled(logits, [sequence(temperature=0.0, logprobs=20)], EOS)
    assert len(report.top) == 4


def test_row_without_truncation_keeps_its_tail_beside_truncated_rows():
    logits = torch.zeros(1, 30000)
    logits[0, 0] = 30.0
    free, cut = SamplingParams(), SamplingParams(top_k=1)
    alone = truncated_probabilities(logits, [free])
    assert truncated_probabilities(logits.repeat(2, 1), [cut, free])[1].equal(alone[0])


def test_sampling_follows_the_probabilities():
    wanted = torch.tensor([0.5, 0.3, 0.2, 0.0])
    one = sequence(temperature=1.0, seed=1)
    counts = torch.zeros(4)
    for _ in range(2000):
        [token], _ = sampled(wanted.log()[None].clone(), [one], ())
        counts[token] += 1
        one.append(token, 0.0, ())
    assert (counts / 2000 - wanted).abs().max() < 0.05


def test_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    single, seeded, other = sequence(seed=5), sequence(seed=5), sequence(seed=6)
    for _ in range(8):
        single.append(sampled(logits.clone(), [single], ())[0][0], 0.0, ())
        first, second = sampled(logits.repeat(2, 1), [other, seeded], ())[0]
        other.append(first, 0.0, ())
        seeded.append(second, 0.0, ())
    assert seeded.tokens == single.tokens != other.tokens


def test_answer_that_goes_on_elsewhere_draws_the_tokens_it_would_have_drawn():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    whole = sequence(seed=5)
    for _ in range(8):
        whole.append(sampled(logits.clone(), [whole], ())[0][0], 0.0, ())
    for cut in range(1, 8):
        generated = tuple(whole.tokens[1 : 1 + cut])
        request = GenerateRequest(
            request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(seed=5), generated=generated
        )
        rest = Sequence(request, None, 0.0, 100, 5)
        while len(rest.tokens) < len(whole.tokens):
            rest.append(sampled(logits.clone(), [rest], ())[0][0], 0.0, ())
        assert rest.tokens == whole.tokens


def test_end_is_forbidden_before_min_tokens():
    logits = torch.tensor([[0.0, 1.0, 0.0, 9.0]])
    tokens, _ = sampled(logits, [sequence(temperature=0.0, min_tokens=2)], EOS)
    assert tokens == [1]


def test_logprobs_are_of_the_untruncated_distribution():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    _, reports = sampled(logits, [sequence(temperature=0.0, logprobs=2, top_k=1)], EOS)
    assert reports[0].position == 1
    assert reports[0].logprob == pytest.approx(torch.tensor(0.4).log().item(), abs=1e-5)
    assert [token for token, _ in reports[0].top] == [3, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("min_p", 1.5), ("max_tokens", 0),
     ("top_k", -1), ("min_tokens", 17), ("logprobs", 21), ("stop", ("",))],
)  # fmt: skip
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_listed_tokens_and_the_chosen_one_are_reported_in_place_of_the_likeliest():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(3, 1)
    rows = [
        sequence(temperature=0.0, logprobs=2, logprob_token_ids=(3, 2)),
        sequence(temperature=0.0, logprobs=2),
        sequence(temperature=0.0, logprobs=0, logprob_token_ids=(0,)),
    ]
    tokens, [listed, likeliest, chosen] = sampled(logits.clone(), rows, EOS)
    assert tokens == [0, 0, 0]
    assert [token for token, _ in listed.top] == [3, 2, 0]
    expected = torch.log_softmax(logits[0], dim=-1)
    assert [value for _, value in listed.top] == pytest.approx(expected[[3, 2, 0]].tolist())
    assert [token for token, _ in likeliest.top] == [0, 1]
    assert [token for token, _ in chosen.top] == [0]
    for wrong in ({"logprob_token_ids": (1,)}, {"logprobs": 1, "logprob_token_ids": (1,) * 129}):
        with pytest.raises(ValueError, match="logprob_token_ids"):
            SamplingParams(**wrong)
