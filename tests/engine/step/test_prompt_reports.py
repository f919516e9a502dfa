# SPDX-License-Identifier: Apache-2.0
"""Reports of prompts equal transformers': log probabilities, ranks, likeliest tokens and hidden states."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_lora import LLM, SamplingParams
from moe_lora.core.request import NO_TOKEN, GenerateRequest, TokenLogprobs
from moe_lora.engine.step import prompt_reports
from tests.engine.test_oracle import smallest_kv_gb
from tests.grids import diagonal
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.test_oracle import make_prompts
from tests.oracle import reference_hidden, reference_logits

SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
WAYS: dict[str, dict[str, Any]] = {
    "all_at_once": {},
    "chunked_prefill": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "few_pages": {
        "kv_cache_gb": "just_enough",
        "max_model_len": 128,
        "max_num_batched_tokens": 9,
        "max_num_seqs": 8,
    },
    "compiled": {"eager": False},
    "expert_parallel": {"expert_parallel": 2},
    "tensor_parallel": {"tensor_parallel": 2},
}
QUICK = {("llama", "all_at_once"), ("gpt_oss", "few_pages")}
CASES = [
    pytest.param(family, way, marks=() if (family, way) in QUICK else pytest.mark.slow)
    for family in ("llama", "gpt_oss")
    for way in WAYS
    if (family, way) != ("llama", "expert_parallel")
]


def settings_of(way: str, model) -> dict[str, Any]:
    settings = {"eager": True, **WAYS[way]}
    if settings.get("kv_cache_gb") == "just_enough":
        settings["kv_cache_gb"] = smallest_kv_gb(model)
    return settings


def check_scores(model, adapter, completion) -> None:
    """The report's log probabilities against one pass of transformers."""
    prompt, found = completion.prompt_token_ids, completion.prompt_logprobs
    assert found[0] is None
    assert len(found) == len(prompt)
    if len(prompt) == 1:
        return
    expected = torch.log_softmax(reference_logits(model.model_dir, adapter, prompt)[:-1], dim=-1)
    chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    torch.testing.assert_close(torch.tensor([one.logprob for one in found[1:]]), chosen[:, 0], **CLOSE)
    for row, target, one in zip(expected, chosen, found[1:], strict=True):
        lead, near = (int((row > target + bound).sum()) + 1 for bound in (1e-3, -1e-3))
        assert lead <= one.position <= near
        values = torch.tensor([value for _, value in one.top])
        torch.testing.assert_close(values, row.topk(3).values, **CLOSE)
        torch.testing.assert_close(values, row[[token for token, _ in one.top]], **CLOSE)


@pytest.mark.parametrize(("family", "way"), CASES)
def test_prompts_score_as_in_transformers(family, way, served, monkeypatch):  # noqa: F811
    monkeypatch.setattr(prompt_reports, "LOGITS_BYTES", 4 * 5 * 256)  # few rows of logits at a time
    model, prompts = served(family), [one for one in make_prompts() if len(one) < 100]
    adapters = {path.name: str(path) for path in model.adapters}
    names = [[None, *adapters][number % (1 + len(adapters))] for number in range(len(prompts))]
    scored = replace(SCORED, max_tokens=40 if way == "few_pages" else 4)
    plain = replace(scored, prompt_logprobs=None)
    with LLM(model.model_dir, adapters=adapters, dtype="float32", **settings_of(way, model)) as llm:
        cached = llm.generate(prompts, names, plain)  # their blocks are in the prefix cache
        before = llm.stats().num_preemptions
        found = llm.generate(prompts, names, scored)
        preempted = llm.stats().num_preemptions - before
        again = llm.generate(prompts, names, plain)
        stats = llm.stats()
    for name, completion in zip(names, found, strict=True):
        check_scores(model, adapters.get(name), completion)
    assert [one.token_ids for one in found] == [one.token_ids for one in cached]
    assert all(one.prompt_logprobs is None for one in again)
    assert not any(one.num_cached_tokens for one in found)
    if way == "few_pages":
        assert preempted > 0
    else:
        assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(("family", "way"), CASES)
def test_embeddings_are_hidden_states(family, way, served):  # noqa: F811
    model, prompts = served(family), [one for one in make_prompts() if len(one) < 100]
    adapters = {path.name: str(path) for path in model.adapters}
    names = [[None, *adapters][number % (1 + len(adapters))] for number in range(len(prompts))]
    with LLM(model.model_dir, adapters=adapters, dtype="float32", **settings_of(way, model)) as llm:
        for _ in range(2):  # the second time with cached blocks
            found = llm.embed(prompts, names)
            for row, prompt, name in zip(found, prompts, names, strict=True):
                expected = reference_hidden(model.model_dir, adapters.get(name), prompt)[-1]
                torch.testing.assert_close(row, expected / expected.norm(), **CLOSE)


@pytest.mark.parametrize("length", [31, 32])
def test_a_prompt_as_long_as_the_context_has_a_hidden_state(length, served):  # noqa: F811
    model, prompt = served("llama"), (max(make_prompts(), key=len) * 2)[:length]
    settings = {"dtype": "float32", "eager": True, "max_model_len": length, "block_size": 16}
    with LLM(model.model_dir, **settings) as llm:
        for _ in range(2):
            [row] = llm.embed([prompt])
        with pytest.raises(ValueError, match=f"the prompt has {length + 1} tokens"):
            llm.embed([[*prompt, 5]])
        with pytest.raises(ValueError, match=f"the prompt has {length} tokens"):
            llm.generate([prompt])
    expected = reference_hidden(model.model_dir, None, prompt)[-1]
    torch.testing.assert_close(row, expected / expected.norm(), **CLOSE)


def test_scores_beside_edits_and_answers(served):  # noqa: F811
    """A request with edits of logits is scored before the edits, like its neighbours."""
    model, prompt = served("llama"), make_prompts()[0]
    edited = SamplingParams(temperature=0.0, max_tokens=2, allowed_token_ids=(5,), prompt_logprobs=0)
    with LLM(model.model_dir, dtype="float32", eager=True) as llm:
        plain, forced = llm.generate([prompt, prompt], None, [SCORED, edited])
    check_scores(model, None, plain)
    assert forced.token_ids == (5, 5)
    found = [(one.logprob, one.position, one.top) for one in forced.prompt_logprobs[1:]]
    assert found == [(one.logprob, one.position, ()) for one in plain.prompt_logprobs[1:]]


@pytest.mark.parametrize(("scored", "tokens_a_step"), diagonal((None, 2), (9, 512)))
def test_listed_tokens_score_at_each_place_of_the_prompt(scored, tokens_a_step, served):  # noqa: F811
    model, prompt = served("llama"), max(make_prompts(), key=len)[:40]
    adapters = {path.name: str(path) for path in model.adapters}
    name, start = next(iter(adapters)), 7
    rows = tuple((prompt[place], 3, NO_TOKEN, place)[: 1 + place % 4] for place in range(start + 1, 40))
    asked = SamplingParams(
        max_tokens=2, prompt_logprobs=scored, prompt_logprob_token_ids=rows, prompt_logprob_start=start
    )
    neighbour = SamplingParams(max_tokens=2, prompt_logprobs=3)
    settings = {"dtype": "float32", "eager": True, "max_num_batched_tokens": tokens_a_step}
    with LLM(model.model_dir, adapters=adapters, max_num_seqs=8, **settings) as llm:
        for _ in range(2):  # the second time with cached blocks
            found, other, _ = llm.generate(
                [prompt] * 3, [name] * 3, [asked, neighbour, replace(neighbour, prompt_logprobs=None)]
            )
        with pytest.raises(ValueError, match="has 32 rows, but the prompt of 39 tokens has 31 scored rows"):
            llm.generate([prompt[:-1]], [name], asked)
        with pytest.raises(ValueError, match="prompt_logprob_token_ids has token id 256, outside"):
            llm.generate([prompt], [name], replace(asked, prompt_logprob_token_ids=((256,),) * 32))
    check_scores(model, adapters[name], other)
    assert other.prompt_id_logprobs is None
    assert (found.prompt_logprobs is None) == (scored is None)
    expected = torch.log_softmax(reference_logits(model.model_dir, adapters[name], prompt), dim=-1)
    assert found.prompt_id_logprobs.shape == (32, 4)
    for place, ids in enumerate(rows):
        for column in range(4):
            token = ids[column] if column < len(ids) else NO_TOKEN
            value = found.prompt_id_logprobs[place, column]
            if token == NO_TOKEN:
                assert value == -torch.inf
            else:
                torch.testing.assert_close(value, expected[start + place, token], **CLOSE)


def test_the_caller_makes_the_numbers_of_a_prompt_not_the_engine(served, monkeypatch):  # noqa: F811
    threads, made = set(), TokenLogprobs.__init__

    def noted(report: TokenLogprobs, *args: Any, **fields: Any) -> None:
        threads.add(threading.current_thread())
        made(report, *args, **fields)

    monkeypatch.setattr(TokenLogprobs, "__init__", noted)
    prompt = max(make_prompts(), key=len)[:40]
    with LLM(served("llama").model_dir, dtype="float32", eager=True) as llm:
        [found] = llm.generate([prompt], None, replace(SCORED, prompt_logprobs=-1))
    assert [len(one.top) for one in found.prompt_logprobs[1:]] == [96] * 39
    assert threads == {threading.current_thread()}


def test_scores_beyond_the_memory_are_refused(served, monkeypatch):  # noqa: F811
    monkeypatch.setattr(prompt_reports, "MAX_BYTES", 8 * 97 * 4)
    whole, prompt = replace(SCORED, prompt_logprobs=-1), max(make_prompts(), key=len)
    with LLM(served("llama").model_dir, dtype="float32", eager=True) as llm:
        with pytest.raises(ValueError, match="prompt_logprobs has 3880 bytes, more than 3104; shorten"):
            llm.generate([prompt[:6]], None, whole)
        [found] = llm.generate([prompt[:5]], None, whole)
    assert len(found.prompt_logprobs) == 5


def test_one_prompt_has_64_mib_at_most():
    whole, least = replace(SCORED, prompt_logprobs=-1), 8 * (1 << 17)
    for num, fits in ((65, True), (66, False)):
        asked = GenerateRequest(request_id="a", prompt_token_ids=(1,) * num, sampling=whole)
        with nullcontext() if fits else pytest.raises(ValueError, match=f"has {65 * least} bytes"):
            prompt_reports.PromptRecord(asked, (1 << 17) - 1)


@pytest.mark.parametrize("value", [-2, 21])
def test_numbers_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=f"prompt_logprobs={value} is not allowed"):
        SamplingParams(prompt_logprobs=value)
