# SPDX-License-Identifier: Apache-2.0
"""A quantised base in the running engine: what stands around it changes no token."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from moe_lora import LLM, SamplingParams
from moe_lora.config import EngineConfig
from moe_lora.config.optional_parts import EmulationConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.progress import silent
from moe_lora.models.quantised_checkpoint import quantise_checkpoint
from moe_lora.models.quantised_weight import quantisation_of
from tests.families import (
    BESIDE_FAMILIES,
    FURTHER,
    LATENT_FAMILIES,
    LATER_FAMILIES,
    NEWER,
    RECURRENT_FAMILIES,
    later,
    make_adapter,
)
from tests.models.generated_code import captured_graphs
from tests.models.test_oracle import make_prompts
from tests.models.test_quantised import SLOTS, base  # noqa: F401  (the fixture)
from tests.oracle import greedy_reference
from tests.quantised import dequantised_checkpoint
from tests.stored_checkpoints import mxfp4_pair, stored_pair

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WAYS = {
    "eager": {"eager": True},
    "compiled": {},
    "captured": {},
    "padded": {"decode_buckets": (4,)},
    "padded_captured": {"decode_buckets": (4,)},
    "expert_parallel": {"eager": True, "expert_parallel": 2},
    "tensor_parallel": {"eager": True, "tensor_parallel": 2},
    "host_workers": {
        "eager": True,
        "host_workers": 1,
        "host_tokens_per_worker": 8,
        "emulation": EmulationConfig(load_gb_per_s=2e-4),
    },
}
CASES = [
    pytest.param("llama", "int8", "compiled", marks=pytest.mark.slow),
    ("mixtral", "int4", "eager"),
    pytest.param("mixtral", "int4", "captured", marks=pytest.mark.slow),
    pytest.param("mixtral", "int4", "compiled", marks=pytest.mark.slow),
    ("gpt_oss", "int8", "padded_captured"),
    pytest.param("gpt_oss", "int8", "padded", marks=pytest.mark.slow),
    pytest.param("mixtral", "int8", "expert_parallel", marks=pytest.mark.slow),
    ("qwen3_moe", "int4", "host_workers"),
    ("dbrx", "int8", "eager"),
    *((family, "int8", "eager") for family in BESIDE_FAMILIES),
    ("gemma4", "int8", "eager"),
    *(pytest.param(one, "int8", "compiled", marks=pytest.mark.slow) for one in FURTHER),
    *(pytest.param(*one.values, "int8", "eager", marks=one.marks) for one in later("qwen3", "phimoe")),
    *(
        pytest.param(one, "int8", "eager", marks=pytest.mark.slow)
        for one in (*NEWER, *RECURRENT_FAMILIES, *LATENT_FAMILIES)
    ),
    *(pytest.param(one, "int4", "eager", marks=pytest.mark.slow) for one in LATER_FAMILIES),
]


@pytest.mark.parametrize(("family", "quantize", "way"), CASES)
def test_mixed_batch_continues_as_peft_does(family, quantize, way, base, tmp_path):  # noqa: F811
    model_dir, adapters = base(family)
    group = 32 if quantize == "int4" else None
    oracle = dequantised_checkpoint(model_dir, quantisation_of(quantize, group, False), tmp_path / "plain")
    prompts, names = make_prompts(), [None if slot < 0 else adapters[slot].name for slot in SLOTS]
    given = {path.name: str(path) for path in adapters}
    settings = {"quantize": quantize, "quantize_group_size": group, **WAYS[way]}
    layers = captured_graphs() if way.endswith("captured") else nullcontext()
    with layers, LLM(model_dir, adapters=given, dtype="float32", num_threads=1, **settings) as llm:
        found = llm.generate(prompts, names, GREEDY)
        stats = llm.stats()
    for slot, prompt, completion in zip(SLOTS, prompts, found, strict=True):
        expected = greedy_reference(
            oracle, None if slot < 0 else adapters[slot], [prompt], NUM_TOKENS, [completion.token_ids]
        )
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0], (slot, len(prompt))
    assert stats.lora_rows_local > 0
    assert (stats.lora_rows_host > 0) == (way == "host_workers")


STORED = [
    ("mixtral", "w4a16", "expert_parallel"),
    ("llama", "w8a16", "tensor_parallel"),
    pytest.param("mixtral", "w8a16", "tensor_parallel", marks=pytest.mark.slow),
    pytest.param("dbrx", "torchao-int8", "tensor_parallel", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "fp8", "expert_parallel", marks=pytest.mark.slow),
    pytest.param("llama", "torchao-fp8", "compiled", marks=pytest.mark.slow),
    pytest.param("mixtral", "torchao-int8", "host_workers", marks=pytest.mark.slow),
    pytest.param("dbrx", "w8a16", "padded", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "kind", "way"), STORED)
def test_checkpoint_that_comes_quantised_is_served_as_it_is(family, kind, way, base, tmp_path):  # noqa: F811
    model_dir, adapters = base(family)
    stored, plain = stored_pair(model_dir, kind, tmp_path)
    assert_served_as_peft_does(stored, plain, adapters, way)


def assert_served_as_peft_does(stored, plain, adapters, way):
    """Mixed batch and greedy tokens in fp32; plain: the weights that are meant."""
    prompts, names = make_prompts(), [None if slot < 0 else adapters[slot].name for slot in SLOTS]
    given = {path.name: str(path) for path in adapters}
    with LLM(stored, adapters=given, dtype="float32", num_threads=1, **WAYS[way]) as llm:
        found = llm.generate(prompts, names, GREEDY)
        stats = llm.stats()
    for slot, prompt, completion in zip(SLOTS, prompts, found, strict=True):
        expected = greedy_reference(
            plain, None if slot < 0 else adapters[slot], [prompt], NUM_TOKENS, [completion.token_ids]
        )
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0], (slot, len(prompt))
    assert stats.lora_rows_local > 0


@pytest.mark.parametrize(
    "kind",
    ["mxfp4", pytest.param("int4", marks=pytest.mark.slow), pytest.param("fp8", marks=pytest.mark.slow)],
)
def test_experts_of_gpt_oss_are_divided_between_ranks_as_stored(kind, base, tmp_path):  # noqa: F811
    """As they are published, and as `moe-lora quantize` writes them."""
    if kind == "mxfp4":
        plain, stored = mxfp4_pair(tmp_path)
        adapters = [make_adapter("gpt_oss", plain, tmp_path / str(n), n, seed=n) for n in (4, 8)]
    else:
        model_dir, adapters = base("gpt_oss")
        stored, quantisation = (
            tmp_path / "stored",
            quantisation_of(kind, 32 if kind == "int4" else None, False),
        )
        quantise_checkpoint(model_dir, stored, quantisation, torch.float32, silent)
        plain = dequantised_checkpoint(model_dir, quantisation, tmp_path / "plain")
    assert_served_as_peft_does(stored, plain, adapters, "expert_parallel")


def test_merging_into_a_checkpoint_that_comes_quantised_is_refused(base, tmp_path):  # noqa: F811
    stored, _ = stored_pair(base("llama")[0], "w8a16", tmp_path)
    with pytest.raises(ConfigError, match="batching='merged' and a checkpoint with quantised weights"):
        LLM(stored, dtype="float32", batching="merged")
    with LLM(stored, dtype="float32", batching="merged", quantize="none", eager=True) as llm:
        assert len(llm.generate([[3, 4, 5]], [None], GREEDY)[0].token_ids) == NUM_TOKENS


@pytest.mark.parametrize(
    ("quantize", "ways"),
    [
        ("int8-dynamic", ("expert_parallel",)),
        pytest.param("int8-dynamic", ("host_workers",), marks=pytest.mark.slow),
        pytest.param("int4-dynamic", ("expert_parallel",), marks=pytest.mark.slow),
    ],
)
def test_dynamic_answers_are_the_same_alone_and_however_the_work_is_divided(quantize, ways, base):  # noqa: F811
    model_dir, adapters = base("mixtral")
    prompts, names = make_prompts(), [None if slot < 0 else adapters[slot].name for slot in SLOTS]
    given = {path.name: str(path) for path in adapters}
    settings = {"quantize": quantize, "quantize_group_size": 32 if quantize == "int4-dynamic" else None}
    short = replace(GREEDY, max_tokens=8)

    def start(**more):
        return LLM(model_dir, adapters=given, dtype="float32", num_threads=1, **settings, **more)

    with start(eager=True, prefix_caching=False) as llm:
        alone = [llm.generate([p], [n], short)[0].token_ids for p, n in zip(prompts, names, strict=True)]
        assert [one.token_ids for one in llm.generate(prompts, names, short)] == alone
    for way in ways:
        with start(**WAYS[way]) as llm:
            assert [one.token_ids for one in llm.generate(prompts, names, short)] == alone, way
            assert (llm.stats().lora_rows_host > 0) == (way == "host_workers")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize": "fp9"}, "quantize='fp9' is not known; choose one of checkpoint, none, int8"),
        ({"quantize_group_size": 32}, "quantize_group_size=32 is for int4 and fp8, not for quantize='check"),
        ({"quantize": "fp8", "quantize_group_size": 64}, "quantize_group_size=64 must be 128 with fp8"),
        ({"quantize": "int8", "quantize_group_size": 32}, "is for int4"),
        ({"quantize": "int4", "quantize_group_size": 48}, "quantize_group_size=48 must be 32, 64 or 128"),
        ({"quantize_head": True}, "quantize_head=True needs a format"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="", **settings)
