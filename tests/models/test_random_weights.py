# SPDX-License-Identifier: Apache-2.0
"""Models of random weights: made from config.json alone, the same each time and on each rank."""

from __future__ import annotations

import json

import pytest
import torch

from moe_lora import LLM, SamplingParams
from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.shard import ModelShard
from moe_lora.families import shape_of
from moe_lora.models.loader import random_model, refill_random
from moe_lora.models.quantised_weight import Quantisation, QuantisedWeight, quantisation_of
from tests.families import FAMILIES, MOE_FAMILIES, make_adapter, make_checkpoint, tiny_config

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


def made(
    family: str, quantisation: Quantisation | None = None, shard: dict[str, int] | None = None, **changes
):
    config = json.loads(tiny_config(family).to_json_string(use_diff=False)) | changes
    share = ModelShard(shape_of(config), **(shard or {}))
    return random_model(config, torch.float32, CPU, share, quantisation)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_same_each_time_and_neither_vanish_nor_explode(family):
    first, again = made(family).state_dict(), made(family).state_dict()
    assert first.keys() == again.keys()
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if weight.dim() > 1 and name != "embedding" and not name.endswith("bias"):
            assert weight.square().mean() * weight.shape[-1] == pytest.approx(1.0, abs=0.3), name
    layers = [first[f"layers.{layer}.attention.o.weight"] for layer in range(2)]
    assert not torch.equal(*layers)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_rank_makes_the_experts_that_one_process_has(family):
    whole, part = (
        made(family).state_dict(),
        made(family, shard={"expert_parallel": 2, "dist_rank": 1}).state_dict(),
    )
    for name, weight in part.items():
        of_experts = ".mlp." in name and whole[name].shape != weight.shape
        assert torch.equal(weight, whole[name][2:] if of_experts else whole[name]), name
    assert part["layers.0.mlp.down.weight"].shape[0] == 2


@pytest.mark.parametrize(("tensor_parallel", "expert_parallel"), [(1, 2), (2, 1), (2, 2)])
def test_a_rank_s_weights_are_made_again_in_place(tensor_parallel, expert_parallel):
    shard = {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel, "dist_rank": 1}
    model = made("qwen3_moe", shard=shard)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for weight in model.parameters():
        weight.data.zero_()
    refill_random(model, json.loads(tiny_config("qwen3_moe").to_json_string(use_diff=False)), CPU)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_experts_of_an_mxfp4_config_are_held_as_mxfp4():
    config = tiny_config("gpt_oss", intermediate_size=32).to_dict()
    config["quantization_config"] = {"quant_method": "mxfp4"}
    model = random_model(config, torch.float32, CPU)
    experts = [layer.mlp.down.weight for layer in model.layers]
    assert all(isinstance(weight, QuantisedWeight) and weight.form.name == "mxfp4" for weight in experts)
    values = experts[0].dequantised()
    assert 0.5 < values.square().mean() * 32 < 2
    assert not torch.equal(values[0], values[1])
    plain = random_model(config, torch.float32, CPU, None, Quantisation(None))
    assert torch.equal(plain.layers[0].mlp.down.weight, values)


def test_weights_are_quantised_as_they_are_made():
    model = made("mixtral", quantisation=quantisation_of("int8", None, False))
    held, plain = model.layers[1].mlp.gate_up.weight, made("mixtral").layers[1].mlp.gate_up.weight
    assert held.form.name == "int8"
    torch.testing.assert_close(held.dequantised(), plain, rtol=0.0, atol=2e-3)


def test_a_folder_with_a_config_alone_serves_adapters(tmp_path):
    config = tiny_config("mixtral", num_hidden_layers=1)
    adapter = make_adapter("mixtral", make_checkpoint("mixtral", tmp_path / "one", num_hidden_layers=1),
                           tmp_path / "a")  # fmt: skip
    config.num_hidden_layers = 40
    config.save_pretrained(tmp_path / "large")
    options = {"load_format": "dummy", "num_layers": 1, "dtype": "float32", "eager": True, "num_threads": 1}
    options |= {"adapters": {"a": str(adapter)}, "max_model_len": 64}
    answers = []
    for num_ranks in (1, 2):
        with LLM(str(tmp_path / "large"), **options, expert_parallel=num_ranks) as llm:
            found = llm.generate([[5, 6, 7]] * 2, [None, "a"], GREEDY)
            answers.append([one.token_ids for one in found])
            assert all(torch.tensor([t.logprob for t in one.logprobs]).isfinite().all() for one in found)
            with pytest.raises(ValueError, match="tokenizer"):
                llm.generate("text")
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_layers": 1}, "give load_format='dummy' too"),
        ({"num_layers": 3, "load_format": "dummy"}, "num_layers=3 is more than the model's 2"),
        ({"load_format": "dumy"}, "choose one of safetensors, dummy"),
    ],
)
def test_what_can_not_be_made_is_refused(settings, problem, tmp_path):
    tiny_config("mixtral").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(model_dir=str(tmp_path), **settings).hf_config()


def test_another_quantised_config_is_refused():
    with pytest.raises(ConfigError, match="no weights of quant_method='fp8'"):
        made("qwen3_moe", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="no weights of quant_method='fp8'"):
        made("qwen3_moe", text_config={"quantization_config": {"quant_method": "fp8"}})
