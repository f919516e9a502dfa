# SPDX-License-Identifier: Apache-2.0
"""Chosen experts of tokens equal transformers', and tokens do not change by the report."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from moe_lora import LLM, SamplingParams
from moe_lora.core.request import GenerateRequest, PromptReport
from moe_lora.engine.sequence import Sequence
from moe_lora.engine.step.routed_experts import ExpertRecord
from moe_lora.engine.step.sampler import HostCopy
from tests.engine.test_oracle import smallest_kv_gb
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.generated_code import captured_graphs
from tests.models.test_oracle import make_prompts
from tests.oracle import reference_experts

PLAIN = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NOTED = replace(PLAIN, routed_experts=True)
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 9, "max_num_seqs": 8}
WAYS: dict[str, dict[str, Any]] = {
    "all_at_once": {},
    "chunked_prefill": CHUNKS,
    "few_pages": {"kv_cache_gb": "just_enough", "max_model_len": 128, **CHUNKS},
    "compiled": {"eager": False, "decode_buckets": (8,)},
    "expert_parallel": {"expert_parallel": 2},
    "tensor_parallel": {"tensor_parallel": 2},
}
QUICK = {("gpt_oss", "few_pages"), ("qwen3_moe", "compiled")}
CASES = [
    pytest.param(family, way, marks=() if (family, way) in QUICK else pytest.mark.slow)
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
    for way in WAYS
    if (family, way) != ("deepseek_v3", "tensor_parallel")
]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_tokens_have_the_experts_of_transformers(family, way, served):  # noqa: F811
    model, prompts = served(family), [one for one in make_prompts() if len(one) < 100]
    adapters = {path.name: str(path) for path in model.adapters}
    names = [[None, *adapters][number % (1 + len(adapters))] for number in range(len(prompts))]
    settings = {"eager": True, **WAYS[way]}
    if settings.get("kv_cache_gb"):
        settings["kv_cache_gb"] = smallest_kv_gb(model)
    num_tokens = 40 if way == "few_pages" else 4
    plain, noted = (replace(one, max_tokens=num_tokens) for one in (PLAIN, NOTED))
    graphs = nullcontext() if settings["eager"] else captured_graphs()
    with graphs, LLM(model.model_dir, adapters=adapters, dtype="float32", **settings) as llm:
        expected = llm.generate(prompts, names, plain)  # their blocks are in the prefix cache
        before = llm.stats().num_preemptions
        sampling = [plain if number == 1 else noted for number in range(len(prompts))]
        found = llm.generate(prompts, names, sampling)
        preempted = llm.stats().num_preemptions - before
    assert preempted > 0 or way != "few_pages"
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for number, (name, one) in enumerate(zip(names, found, strict=True)):
        if number == 1:
            assert one.routed_experts is None
            continue
        tokens = (*one.prompt_token_ids, *one.token_ids)[:-1]
        chosen = reference_experts(model.model_dir, adapters.get(name), tokens)
        assert one.routed_experts is not None
        assert torch.equal(one.routed_experts.long(), chosen)


def test_a_prompts_report_comes_beside_its_experts(served):  # noqa: F811
    model, prompt = served("qwen3_moe"), [5, 9, 11, 7]
    with LLM(model.model_dir, dtype="float32", eager=True) as llm:
        [scored] = llm.generate([prompt], None, replace(PLAIN, prompt_logprobs=2))
        [both] = llm.generate([prompt], None, replace(NOTED, prompt_logprobs=2))
        [experts] = llm.generate([prompt], None, NOTED)
    assert both.prompt_logprobs == scored.prompt_logprobs
    assert torch.equal(both.routed_experts, experts.routed_experts)


class OneScore:
    """Scores of one row."""

    rows: ClassVar[dict[int, bytes]] = {0: b"onescore"}


def test_a_prompts_report_keeps_nothing_for_the_answer():
    sampling = replace(NOTED, prompt_logprobs=0, hidden_state=True)
    request = GenerateRequest(request_id="one", prompt_token_ids=(5, 9), sampling=sampling)
    record, scores, hidden = ExpertRecord(request, 128), OneScore(), HostCopy(torch.zeros(4))
    record.add(0, scores, None, 0)
    record.hidden = hidden
    record.add_experts(0, 2, HostCopy(torch.ones(2, 3, 1, dtype=torch.int16)), 0)
    sequence = Sequence(request, None, arrival_s=0.0, limit_tokens=8, seed=None)
    sequence.append(7, 0.0, ())
    report, kept = record.report(sequence), [weakref.ref(one) for one in (scores, hidden)]
    assert report == PromptReport((0, b"onescore"), bytes(16), experts=(3, 1, b"\1\0" * 6))
    del scores, hidden
    assert [one() for one in kept] == [None, None]


def test_an_answer_that_goes_on_elsewhere_reports_the_rest(served):  # noqa: F811
    prompt = (5, 9, 11, 7)

    async def outputs(llm: LLM, request_id: str, generated: tuple[int, ...]) -> list[Any]:
        request = GenerateRequest(
            request_id=request_id, prompt_token_ids=prompt, sampling=NOTED, generated=generated
        )
        return [output async for output in llm.client.generate(request)]

    with LLM(served("qwen3_moe").model_dir, dtype="float32", eager=True) as llm:
        whole = asyncio.run(outputs(llm, "whole", ()))
        tokens = tuple(output.token_ids[0] for output in whole)
        rest = asyncio.run(outputs(llm, "rest", tokens[:2]))
    rows = [output.prompt.experts[2] for output in whole]
    assert len(rows[0]) == len(prompt) * len(rows[1])
    assert [output.prompt.experts[2] for output in rest] == rows[2:]


def test_a_dense_model_has_no_experts(served):  # noqa: F811
    with (
        LLM(served("llama").model_dir, dtype="float32", eager=True) as llm,
        pytest.raises(ValueError, match="routed_experts needs a model with experts"),
    ):
        llm.generate([[5, 9]], None, NOTED)


def test_a_prompt_with_more_experts_than_a_message_carries_is_refused(served, monkeypatch):  # noqa: F811
    monkeypatch.setattr("moe_lora.engine.step.routed_experts.MAX_REPORT_BYTES", 23)
    with LLM(served("qwen3_moe").model_dir, dtype="float32", eager=True) as llm:
        [report] = llm.generate([[5, 9]], None, NOTED)
        assert report.routed_experts.shape[1:] == (2, 2)
        with pytest.raises(ValueError, match=r"prompt of 3 tokens has 24 bytes.*send at most 2 tokens"):
            llm.generate([[5, 9, 11]], None, NOTED)
        llm.generate([[5, 9, 11]], None, PLAIN)
