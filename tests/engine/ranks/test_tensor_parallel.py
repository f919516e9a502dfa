# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks divide heads and inner widths answer as transformers and peft do."""

from __future__ import annotations

import random

import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.families import shape_of
from moe_lora.models.causal_lm import DividedNormedQkv
from tests.dist.lora_server.cluster import Cluster
from tests.families import BESIDE_FAMILIES, FAMILIES, MOE_FAMILIES, NEWER, NEWER_MOE, later
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.oracle import greedy_reference

from .test_expert_parallel import SLOW, TIGHT, settings

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def traffic(model) -> tuple[list[list[int]], list]:
    """A prompt of 1 to 45 tokens for the base model and for each adapter."""
    rng, adapters = random.Random(6), [None, *model.adapters]
    return [[rng.randrange(3, 96) for _ in range(rng.randint(1, 45))] for _ in adapters], adapters


def assert_answers_are_peft_s(llm: LLM, model) -> None:
    prompts, adapters = traffic(model)
    found = llm.generate(prompts, [path and path.name for path in adapters], GREEDY)
    for prompt, adapter, completion in zip(prompts, adapters, found, strict=True):
        expected = greedy_reference(model.model_dir, adapter, [prompt], NUM_TOKENS, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0], adapter


CASES = [
    *((family, 2, 1) for family in (*FAMILIES, *BESIDE_FAMILIES)),
    *(pytest.param(*one.values, 2, 1, marks=one.marks) for one in later("qwen2", "olmoe", "granite", "phi3")),
    ("mixtral", 2, 2),
    *(pytest.param(family, 2, 2, marks=SLOW) for family in (*MOE_FAMILIES[1:], *BESIDE_FAMILIES)),
    *(pytest.param(family, 4, 1, marks=SLOW) for family in FAMILIES),  # more than KV heads
    pytest.param("qwen3_moe", 4, 4, marks=SLOW),
    pytest.param("olmoe", 4, 1, marks=SLOW),
    pytest.param("olmoe", 2, 2, marks=SLOW),
    pytest.param("phimoe", 2, 2, marks=SLOW),
    pytest.param("minimax_m2", 2, 2, marks=SLOW),
    pytest.param("phi3", 4, 1, marks=SLOW),
    *(pytest.param(family, 2, 1, marks=SLOW) for family in NEWER),
    *(pytest.param(family, 2, 2, marks=SLOW) for family in NEWER_MOE),
]


@pytest.mark.parametrize(("family", "tensor", "expert"), CASES)
def test_tokens_are_those_of_transformers_and_peft(family, tensor, expert, served):  # noqa: F811
    model = served(family)
    numbers = {"tensor_parallel": tensor, "expert_parallel": expert}
    with LLM(model.model_dir, **settings(model, **numbers, **TIGHT)) as llm:
        assert_answers_are_peft_s(llm, model)
        runner = llm.client.core._runner
        assert runner._model.spec.shape.num_heads == 4 // tensor
        assert (runner._context.exchanges.experts is not None) == (expert > 1)
        layers = runner._model.layers
        per_layer = (1 if expert > 1 else 2) + isinstance(layers[0].attention.qkv, DividedNormedQkv)
        stats, num_sums = llm.stats(), len(layers) * per_layer
        assert runner._context.exchanges.sums.num_messages == stats.num_steps * num_sums * (tensor - 1)
        assert stats.adapter_evictions > 0


@pytest.mark.parametrize(
    ("family", "expert", "sites"),
    [("llama", 1, "auto"), ("qwen2_moe", 2, "all"), pytest.param("mixtral", 1, "auto", marks=SLOW)],
)
def test_tokens_with_deltas_of_a_lora_server_are_those_of_transformers_and_peft(
    family,
    expert,
    sites,
    served,  # noqa: F811
):
    """Attention, dense MLPs, experts and shared experts; chunks of prompts; adapters take turns."""
    model = served(family)
    numbers = {"tensor_parallel": 2, "expert_parallel": expert}
    cluster = Cluster(shape_of(read_config(model.model_dir)), "EP2-PP1", sites=sites, capacity=2)
    cluster.ranks = expert, 2
    limits = TIGHT | {"lora_server": cluster.config}
    with cluster, LLM(model.model_dir, **settings(model, **numbers, **limits)) as llm:
        assert_answers_are_peft_s(llm, model)
        assert llm.stats().lora_server_fallback_rows == 0


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [None, (4,)])
@pytest.mark.parametrize(("family", "expert"), [("llama", 1), ("gpt_oss", 1), ("mixtral", 2)])
def test_compiled_ranks_give_the_same_tokens(family, expert, buckets, served):  # noqa: F811
    model = served(family)
    numbers = {"tensor_parallel": 2, "expert_parallel": expert}
    with LLM(model.model_dir, **settings(model, eager=False, decode_buckets=buckets, **numbers)) as llm:
        assert_answers_are_peft_s(llm, model)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"expert_parallel": 4}, "tensor_parallel=2 and expert_parallel=4 are of other ranks"),
        (
            {"lora_server": LoraServerConfig(device_puts="ibgda")},
            "device_puts='ibgda' and an instance of 2 ranks",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given, problem):
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(model_dir="m", tensor_parallel=2, **given)


def test_number_that_does_not_divide_the_model_is_refused(served):  # noqa: F811
    with pytest.raises(ConfigError, match="tensor_parallel=3 does not divide num_heads=4"):
        LLM(served("llama").model_dir, tensor_parallel=3)
