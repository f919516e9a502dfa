# SPDX-License-Identifier: Apache-2.0
"""Engines of models with recurrent layers: what holds the state, what repeats, what is refused."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora import LLM, SamplingParams
from moe_lora.core.errors import AdapterError, ConfigError, EngineDeadError
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.ranks.rank import check_layers
from moe_lora.engine.step.unequal_layers import RecurrentContext
from moe_lora.families import shape_of
from tests.families import RECURRENT_FAMILIES, make_adapter, make_checkpoint
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.generated_code import captured_graphs
from tests.models.test_oracle import SLOTS, make_prompts
from tests.oracle import greedy_reference

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=RECURRENT_FAMILIES)
def base(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp("recurrent") / "base")


def answers_as_peft(model, **settings):
    """Generate a mixed batch, and compare each answer with the oracle; returns the engine's figures."""
    prompts = make_prompts()
    names = [None if slot < 0 else model.adapters[slot].name for slot in SLOTS]
    adapters = {path.name: str(path) for path in model.adapters}
    with LLM(model.model_dir, adapters=adapters, dtype="float32", **settings) as llm:
        found = llm.generate(prompts, names, GREEDY)
        stats = llm.stats()
    for slot, prompt, completion in zip(SLOTS, prompts, found, strict=True):
        adapter = None if slot < 0 else model.adapters[slot]
        expected = greedy_reference(model.model_dir, adapter, [prompt], NUM_TOKENS, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0]
    return stats


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        pytest.param({"eager": False, "decode_buckets": (8,)}, captured_graphs, id="captured"),
        pytest.param({"eager": False}, nullcontext, id="compiled", marks=pytest.mark.slow),
        pytest.param({"eager": True, "async_scheduling": "on"}, nullcontext, id="ahead"),
    ],
)
def test_compiled_steps_and_steps_ahead_answer_as_peft_does(settings, layers, served):  # noqa: F811
    with layers():
        answers_as_peft(served("qwen3_next"), **settings)


def test_two_ranks_with_half_of_the_experts_each_answer_as_peft_does(served):  # noqa: F811
    answers_as_peft(
        served("qwen3_5_moe"), eager=True, expert_parallel=2, max_num_seqs=8, max_num_batched_tokens=9
    )


def test_merged_weights_answer_as_peft_does(served):  # noqa: F811
    stats = answers_as_peft(served("qwen3_next"), eager=True, batching="merged")
    assert stats.steps_merged > 0


def chats(rounds=3):
    """Turns of four chats, two with one prefix, in rounds: prompts and the kinds of their adapters."""
    prompts = make_prompts((37, 37, 61, 18))
    prompts[1][:30] = prompts[0][:30]
    more = make_prompts((9, 14, 5, 23), seed=1)
    for number in range(rounds):
        yield [a + number * b for a, b in zip(prompts, more, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},
        pytest.param({"max_num_batched_tokens": 24, "async_scheduling": "on"}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 512, "expert_parallel": 2}, marks=pytest.mark.slow),
        {"kv_cache_gb": 2e-4, "max_model_len": 128},
    ],
    ids=str,
)
def test_answers_are_equal_with_and_without_shared_prefixes(settings, served):  # noqa: F811
    model = served("qwen3_5_moe")
    adapters = {path.name: str(path) for path in model.adapters}
    names = [None, None, *list(adapters)[:2]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    found = {}
    for prefix_caching in (True, False):
        settings = settings | {"prefix_caching": prefix_caching, "block_size": 4, "max_num_seqs": 4}
        with LLM(model.model_dir, adapters=adapters, dtype="float32", eager=True, **settings) as llm:
            answers = [llm.generate(prompts, names, params) for prompts in chats()]
            stats = llm.stats()
        assert (stats.prefix_hit_tokens > 0) == prefix_caching
        found[prefix_caching] = [one for turn in answers for one in turn]
    for one, other in zip(found[True], found[False], strict=True):
        assert one.token_ids == other.token_ids
        logprobs, others = ([each.logprob for each in of.logprobs] for of in (one, other))
        assert logprobs == pytest.approx(others, abs=1e-5)  # torch's exp has other bits in tails of vectors


@pytest.mark.slow
def test_preempted_requests_answer_as_those_with_room(served):  # noqa: F811
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    found, sizes = [], {"block_size": 4, "max_num_seqs": 4, "max_model_len": 128}
    for kv_cache_gb in (1e-4, 1e-2):
        model_dir = served("qwen3_5_moe").model_dir
        with LLM(model_dir, dtype="float32", eager=True, kv_cache_gb=kv_cache_gb, **sizes) as llm:
            found.append([one.token_ids for one in llm.generate(next(chats()), None, params)])
            assert (llm.stats().num_preemptions > 0) == (kv_cache_gb == 1e-4)
    assert found[0] == found[1]


def test_a_step_that_failed_is_computed_again_from_the_state_before(served, monkeypatch):  # noqa: F811
    compute, calls = RecurrentContext.delta_rule, itertools.count()

    def fails_once(self, layer, *operands):
        y = compute(self, layer, *operands)
        if next(calls) == 9:
            assert layer == 2, "an earlier layer of the step has made its states"
            raise RuntimeError("this layer fails once")
        return y

    monkeypatch.setattr(RecurrentContext, "delta_rule", fails_once)
    prompts, model_dir = make_prompts((9, 5)), served("qwen3_next").model_dir
    with LLM(model_dir, dtype="float32", eager=True) as llm:
        found = llm.generate(prompts, None, GREEDY)
    assert next(calls) > 2 * NUM_TOKENS
    for prompt, completion in zip(prompts, found, strict=True):
        expected = greedy_reference(model_dir, None, [prompt], NUM_TOKENS, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0]


def test_a_step_with_stored_states_does_not_run_again(base, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no draw")

    with LLM(base, dtype="float32", eager=True) as llm:
        core = llm.client.core
        monkeypatch.setattr(core.sampler, "draw", fails)
        with pytest.raises(EngineDeadError, match="no draw"):
            llm.generate([[5, 6, 7]], None, GREEDY)
        assert not core._runner.can_repeat(RuntimeError())


def test_pages_of_the_state_are_counted_and_given_back(base):
    shape = shape_of(read_config(base))
    with LLM(base, dtype="float32", eager=True, kv_cache_gb=0.001) as llm:
        core = llm.client.core
        page_bytes = core.adapters.page_bytes
        assert shape.state_pages(page_bytes) >= len(shape.delta.layers)
        llm.generate([[5, 6, 7]], None, SamplingParams(temperature=0.0, max_tokens=4))
        assert llm.stats().kv_usage == 0


def test_less_memory_than_one_state_is_refused(base):
    with pytest.raises(ConfigError, match="at least"):
        LLM(base, dtype="float32", eager=True, kv_cache_gb=1e-6, max_model_len=16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_workers": 1}, "host_workers=1 may compute a step's tokens twice"),
        ({"tensor_parallel": 2}, "tensor_parallel=2 and Gated DeltaNet layers do not go together"),
    ],
)
def test_parts_without_recurrent_layers_are_refused_at_the_start(settings, message, base):
    with pytest.raises(ConfigError, match=message):
        LLM(base, dtype="float32", eager=True, **settings)


def test_a_device_without_a_kernel_is_refused(base):
    from moe_lora.config import EngineConfig

    with pytest.raises(ConfigError, match="device='cuda' has no kernel of Gated DeltaNet layers"):
        check_layers(EngineConfig(model_dir=str(base)), shape_of(read_config(base)), "cuda")


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_pair_on_the_convolution_is_refused_by_name(family, tmp_path):
    base = make_checkpoint(family, tmp_path / "base")
    adapter = make_adapter(family, base, tmp_path / "a", targets=("delta_out",))
    tensors = load_file(adapter / "adapter_model.safetensors")
    path = "base_model.model.model.layers.0.linear_attn.conv1d"
    tensors |= {f"{path}.lora_A.weight": torch.ones(4, 1, 3), f"{path}.lora_B.weight": torch.ones(8, 4, 1)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"].append("conv1d")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=r"conv1d.*train without conv1d in target_modules"):
        LLM(base, adapters={"a": str(adapter)}, dtype="float32", eager=True)
