"""A quantised base in the running engine: what stands around it changes no token."""

from __future__ import annotations

import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.config import EngineConfig
from moe_lora.config.engine import EmulationConfig
from moe_lora.core.errors import ConfigError
from moe_lora.models.quantised_weight import quantisation_of
from tests.models.test_oracle import make_prompts
from tests.models.test_quantised import SLOTS, base  # noqa: F401  (the fixture)
from tests.oracle import greedy_reference
from tests.quantised import dequantised_checkpoint

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WAYS = {
    "eager": {"eager": True},
    "compiled": {},
    "padded": {"decode_buckets": (4,)},
    "expert_parallel": {"eager": True, "expert_parallel": 2},
    "host_workers": {
        "eager": True,
        "host_workers": 1,
        "host_tokens_per_worker": 8,
        "emulation": EmulationConfig(load_gb_per_s=2e-4),
    },
}
CASES = [
    ("llama", "int8", "compiled"),
    ("mixtral", "int4", "compiled"),
    ("gpt_oss", "int8", "padded"),
    ("mixtral", "int8", "expert_parallel"),
    ("qwen3_moe", "int4", "host_workers"),
    ("dbrx", "int8", "eager"),
]


@pytest.mark.parametrize(("family", "quantize", "way"), CASES)
def test_mixed_batch_continues_as_peft_does(family, quantize, way, base, tmp_path):  # noqa: F811
    model_dir, adapters = base(family)
    group = 32 if quantize == "int4" else None
    oracle = dequantised_checkpoint(model_dir, quantisation_of(quantize, group, False), tmp_path / "plain")
    prompts, names = make_prompts(), [None if slot < 0 else adapters[slot].name for slot in SLOTS]
    given = {path.name: str(path) for path in adapters}
    settings = {"quantize": quantize, "quantize_group_size": group, **WAYS[way]}
    with LLM(model_dir, adapters=given, dtype="float32", num_threads=1, **settings) as llm:
        found = llm.generate(prompts, names, GREEDY)
        stats = llm.stats()
    for slot, prompt, completion in zip(SLOTS, prompts, found, strict=True):
        expected = greedy_reference(oracle, None if slot < 0 else adapters[slot], [prompt], NUM_TOKENS)
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0], (slot, len(prompt))
    assert stats.lora_rows_local > 0
    assert (stats.lora_rows_host > 0) == (way == "host_workers")


@pytest.mark.parametrize(
    ("quantize", "ways"),
    [("int8-dynamic", ("expert_parallel", "host_workers")), ("int4-dynamic", ("expert_parallel",))],
)
def test_dynamic_answers_are_the_same_alone_and_however_the_work_is_divided(quantize, ways, base):  # noqa: F811
    model_dir, adapters = base("mixtral")
    prompts, names = make_prompts(), [None if slot < 0 else adapters[slot].name for slot in SLOTS]
    given = {path.name: str(path) for path in adapters}
    settings = {"quantize": quantize, "quantize_group_size": 32 if quantize == "int4-dynamic" else None}

    def start(**more):
        return LLM(model_dir, adapters=given, dtype="float32", num_threads=1, **settings, **more)

    with start(eager=True, prefix_caching=False) as llm:
        alone = [llm.generate([p], [n], GREEDY)[0].token_ids for p, n in zip(prompts, names, strict=True)]
        assert [one.token_ids for one in llm.generate(prompts, names, GREEDY)] == alone
    for way in ways:
        with start(**WAYS[way]) as llm:
            assert [one.token_ids for one in llm.generate(prompts, names, GREEDY)] == alone, way
            assert (llm.stats().lora_rows_host > 0) == (way == "host_workers")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize": "fp8"}, "quantize='fp8' is not known; choose one of none, int8"),
        ({"quantize_group_size": 32}, "quantize_group_size=32 is for int4, not for quantize='none'"),
        ({"quantize": "int8", "quantize_group_size": 32}, "is for int4"),
        ({"quantize": "int4", "quantize_group_size": 48}, "quantize_group_size=48 must be 32, 64 or 128"),
        ({"quantize_head": True}, "quantize_head=True needs a format"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="", **settings)
