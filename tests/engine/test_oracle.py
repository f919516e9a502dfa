# SPDX-License-Identifier: Apache-2.0
"""The whole engine against transformers and peft, token for token, however the work is batched."""

from __future__ import annotations

import random

import pytest

from moe_lora import LLM, SamplingParams
from tests.engine.refusals import least_of
from tests.families import ALL_FAMILIES, FAMILIES, PER_EXPERT_FAMILIES, RECURRENT_FAMILIES
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.test_oracle import LENGTHS, SLOTS, make_prompts
from tests.oracle import greedy_reference

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WAYS = {
    "all_at_once": {},
    "chunked_prefill": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "one_adapter_resident": {"max_loras": 1},
    "few_pages": {"kv_cache_gb": "just_enough", "max_model_len": 128},
}
QUICK = {
    "llama": tuple(WAYS),
    "gpt_oss": ("few_pages",),
    "qwen3_5_moe": ("few_pages",),
    "deepseek_v3": ("chunked_prefill",),
}
"""Further ways in the default run.  A state that recurs has code of its own for preemption."""


def slots_of(family: str) -> tuple[int, ...]:
    """Of later families: the adapter on the gate too, the one of the largest rank, and one per expert."""
    if family in FAMILIES:
        return SLOTS
    other = {0: 1} if family in PER_EXPERT_FAMILIES else {0: 1, 2: 3}
    return tuple(other.get(slot, slot) for slot in SLOTS)


def smallest_kv_gb(served_model) -> float:
    """KV memory in which one request of 128 tokens fits and two do not."""
    settings = {"dtype": "float32", "eager": True, "kv_cache_gb": 1e-9, "max_model_len": 128}
    return least_of(lambda: LLM(served_model.model_dir, **settings))


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(
            family, way, marks=() if way in ("all_at_once", *QUICK.get(family, ())) else pytest.mark.slow
        )
        for family in ALL_FAMILIES
        for way in WAYS
    ],
)
def test_mixed_batch_continues_as_peft_does(family, way, served):  # noqa: F811
    model, prompts, slots = served(family), make_prompts(), slots_of(family)
    settings = dict(WAYS[way])
    if settings.get("kv_cache_gb") == "just_enough":
        settings["kv_cache_gb"] = smallest_kv_gb(model)
    paths = [None if slot < 0 else model.adapters[slot] for slot in slots]
    names = [path and path.name for path in paths]
    adapters = {path.name: str(path) for path in paths if path}
    with LLM(model.model_dir, adapters=adapters, dtype="float32", eager=True, **settings) as llm:
        order = list(range(len(LENGTHS)))
        for round_ in range(2):  # the second time every prompt's full blocks are cached
            random.Random(round_).shuffle(order)
            found = llm.generate([prompts[i] for i in order], [names[i] for i in order], GREEDY)
            for i, completion in zip(order, found, strict=True):
                expected = greedy_reference(
                    model.model_dir, paths[i], [prompts[i]], NUM_TOKENS, [completion.token_ids]
                )
                expected.check_margins()
                assert completion.token_ids == expected.tokens[0], (names[i], len(prompts[i]))
        stats = llm.stats()
    if way == "one_adapter_resident":  # and history leaves with its adapter
        assert stats.adapter_evictions > 0
    else:
        has_room = way != "few_pages" or family not in RECURRENT_FAMILIES  # for snapshots of states
        assert stats.prefix_hit_tokens > 0 or not has_room
    if way == "few_pages":
        assert stats.num_preemptions > 0
