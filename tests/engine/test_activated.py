# SPDX-License-Identifier: Apache-2.0
"""Activated LoRAs beside other rows, against transformers and peft; pages before the invocation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.config import EngineConfig
from moe_lora.core.request import GenerateRequest
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.activated import invocation_start
from moe_lora.engine.build import build_engine
from moe_lora.families import shape_of
from tests.adapters.peft.test_outer_sites import outer_adapter
from tests.dist.lora_server.cluster import Cluster
from tests.engine.refusals import least_of
from tests.engine.test_outer_sites import WAYS
from tests.families import make_adapter, make_checkpoint
from tests.oracle import greedy_reference

pytestmark = pytest.mark.filterwarnings("ignore")
INVOCATION = [7, 11]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
BEFORE = [(3 * i + 1) % 90 for i in range(37)]
PROMPTS = {
    "in the middle": [*BEFORE, *INVOCATION, 4, 9, 2],
    "at the end": [*BEFORE[:20], *INVOCATION],
    "at the start": [*INVOCATION, *BEFORE[:9]],
    "twice": [*BEFORE[:12], *INVOCATION, *BEFORE[12:], *INVOCATION, 8],
    "at a page's start": [*BEFORE[:32], *INVOCATION, 5],
    "none": BEFORE,
    "in part": [*BEFORE[:18], INVOCATION[0]],
}
MOE_WAYS = {**WAYS, "small_blocks": {"block_size": 4}}
QUICK = ("chunked_prefill", "small_blocks", "tensor_parallel")


@pytest.mark.parametrize(
    ("tokens", "start"),
    [([1, 2, 1, 2], 2), ([1, 2], 0), ([2, 1], None), ([1], None), ([1, 1, 2, 3], 1), ([3, 1, 2], 1)],
)
def test_the_last_occurrence_counts(tokens, start):
    assert invocation_start(tokens, [1, 2]) == start


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> checkpoint and adapters: an activated LoRA, and a plain one."""
    known = {}

    def make(family):
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            base = make_checkpoint(family, folder / "base")
            fields = {"alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"}
            alora = outer_adapter(family, base, folder / "a", seed=1, **fields)
            plain = outer_adapter(family, base, folder / "p", seed=2)
            known[family] = base, {"activated": alora, "plain": plain}
        return known[family]

    return make


def test_projections_of_latent_attention_start_at_the_invocation(made, tmp_path):
    base, adapters = made("deepseek_v3")
    fields = {"alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"}
    targets = {"target_modules": LATENT, "target_parameters": None}
    latent = make_adapter("deepseek_v3", base, tmp_path / "latent", seed=4, **targets, **fields)
    assert_tokens_of_peft(base, adapters | {"activated": latent}, block_size=4)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {"block_size": 4}),
        pytest.param("qwen3_next", WAYS["chunked_prefill"], marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"block_size": 4, "batching": "merged"}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"async_scheduling": "on"}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", {"block_size": 4}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", {"block_size": 4, "batching": "merged"}, marks=pytest.mark.slow),
    ],
)
def test_projections_of_recurrent_layers_start_at_the_invocation(family, settings, made, tmp_path):
    base, adapters = made(family)
    fields = {"alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM", "target_parameters": None}
    targets = ("qkv", "o", "delta_qkvz", "delta_ba", "delta_out")
    recurrent = make_adapter(family, base, tmp_path / "recurrent", targets=targets, seed=4, **fields)
    assert_tokens_of_peft(base, adapters | {"activated": recurrent}, **settings)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if way in QUICK and family == "qwen3_moe" else pytest.mark.slow)
        for family in ("llama", "qwen3_moe", "gpt_oss")
        for way in MOE_WAYS
        if not (family == "llama" and way == "expert_parallel")
    ],
)
def test_prompts_continue_as_peft_does(family, way, made):
    assert_tokens_of_peft(*made(family), **MOE_WAYS[way])


def test_beside_a_lora_server_prompts_continue_as_peft_does(made):
    base, adapters = made("qwen3_moe")
    with Cluster(shape_of(read_config(base))) as cluster:
        assert_tokens_of_peft(base, adapters, lora_server=cluster.config)
        assert cluster.rank(0).loop.num_requests > 0


def assert_tokens_of_peft(base, adapters, **settings):
    paths = {name: str(path) for name, path in adapters.items()}
    prompts = [*PROMPTS.values()] * 3
    names = [*["activated"] * len(PROMPTS), *["plain", None] * len(PROMPTS)][: len(prompts)]
    with LLM(base, adapters=paths, dtype="float32", **{"eager": True, **settings}) as llm:
        found = llm.generate(prompts, names, GREEDY) + llm.generate(prompts, names, GREEDY)
    for prompt, name, completion in zip(prompts * 2, names * 2, found, strict=True):
        reference = greedy_reference(base, adapters.get(name), [prompt], NUM_TOKENS, [completion.token_ids])
        reference.check_margins()
        assert completion.token_ids == reference.tokens[0], (name, prompt)


def test_pages_before_the_invocation_are_the_bases(made):
    base, adapters = made("qwen3_moe")
    paths = {name: str(path) for name, path in adapters.items()}
    settings = {"dtype": "float32", "eager": True, "block_size": 4}
    prompt = PROMPTS["in the middle"]
    scored = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    with LLM(base, adapters=paths, **settings) as llm:
        [alone] = llm.generate([prompt], ["activated"], scored)
    with LLM(base, adapters=paths, **settings) as llm:
        llm.generate([BEFORE], [None], GREEDY)
        [after_base] = llm.generate([prompt], ["activated"], scored)
        [plain] = llm.generate([prompt], ["plain"], scored)
    assert (alone.num_cached_tokens, after_base.num_cached_tokens, plain.num_cached_tokens) == (0, 36, 0)
    assert (after_base.token_ids, after_base.logprobs) == (alone.token_ids, alone.logprobs)
    with LLM(base, adapters=paths, **settings) as llm:
        llm.generate([prompt], ["activated"], GREEDY)
        [again] = llm.generate([prompt], ["activated"], scored)
        [of_base] = llm.generate([prompt], [None], scored)
    assert again.num_cached_tokens == of_base.num_cached_tokens == 36
    assert (again.token_ids, again.logprobs) == (alone.token_ids, alone.logprobs)
    with LLM(base, **settings) as llm:
        [expected] = llm.generate([prompt], [None], scored)
    assert (of_base.token_ids, of_base.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_snapshot_found_whole_is_free_after_the_first_step(made):
    base, adapters = made("qwen3_next")
    settings = {
        "adapters": (("activated", str(adapters["activated"])),),
        "dtype": "float32",
        "eager": True,
        "block_size": 4,
        "max_model_len": 96,
    }
    config = EngineConfig(model_dir=str(base), **settings, arena_mb=1e-2)
    core = build_engine(replace(config, arena_mb=least_of(lambda: build_engine(config))))
    prompt, ends = (*BEFORE[:8], *INVOCATION), {}
    try:
        for num_tokens in (3, 86):
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            name = str(num_tokens)
            core.add_request(
                GenerateRequest(
                    request_id=name, prompt_token_ids=prompt, adapter="activated", sampling=sampling
                )
            )
            while core.has_work:
                for output in core.step():
                    ends[name] = output.finish_reason
    finally:
        core.close()
    assert ends == {"3": "length", "86": "length"}
