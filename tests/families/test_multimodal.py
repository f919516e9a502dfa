# SPDX-License-Identifier: Apache-2.0
"""The language model of a multimodal checkpoint is served, and its other tensors are skipped with a word."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora import LLM, SamplingParams
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.text.tokenizer_files import read_eos_token_ids
from moe_lora.families import cut_to, shape_of
from moe_lora.models.loader import load_model
from tests.families import DENSE_FAMILIES, make_adapter, make_checkpoint, save_random, tiny_config
from tests.families.wrapped import LANGUAGE_MODELS, wrapped_language_model
from tests.oracle import greedy_reference

FAMILY = "qwen3_5_moe"
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A checkpoint as transformers saves the whole model, with random weights of the language model."""
    import transformers

    folder = tmp_path_factory.mktemp("multimodal")
    text = make_checkpoint(FAMILY, folder / "text", seed=3)
    config = transformers.Qwen3_5MoeConfig(
        text_config=tiny_config(FAMILY).to_dict(), vision_config=dict(VISION)
    )
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    inner = transformers.AutoModelForCausalLM.from_pretrained(text)
    whole.model.language_model.load_state_dict(inner.model.state_dict())
    whole.lm_head.load_state_dict(inner.lm_head.state_dict())
    whole.save_pretrained(folder / "whole")
    return text, folder / "whole"


def test_weights_are_those_of_the_text_checkpoint(multimodal, caplog):
    text, whole = multimodal
    with caplog.at_level("INFO"):
        found = load_model(whole, torch.float32, torch.device("cpu"))
    assert "are not read: multi-token prediction or vision" in caplog.text
    expected = dict(load_model(text, torch.float32, torch.device("cpu")).named_parameters())
    for name, weight in found.named_parameters():
        assert torch.equal(weight, expected[name]), name


def test_answers_with_an_adapter_are_those_of_transformers_and_peft(multimodal, tmp_path):
    _, whole = multimodal
    adapter = make_adapter(FAMILY, whole, tmp_path / "a", targets=("qkv", "delta_qkvz", "down"), scale=0.5)
    prompts = [[5, 9, 60, 4, 33], [17, 3, 3, 40]]
    with LLM(whole, adapters={"a": str(adapter)}, dtype="float32", eager=True) as llm:
        found = llm.generate(prompts, ["a", None], GREEDY)
    for prompt, path, completion in zip(prompts, (adapter, None), found, strict=True):
        expected = greedy_reference(whole, path, [prompt], 12, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0]


def test_sizes_are_those_of_the_language_model(multimodal):
    text, whole = (read_config(path) for path in multimodal)
    assert shape_of(whole) == shape_of(text)
    assert shape_of(cut_to(whole, 2)) == shape_of(cut_to(text, 2))
    assert shape_of(cut_to(whole, 2)).delta.layers == (0,)


def test_end_tokens_of_the_language_model_end_an_answer(tmp_path):
    config = {"model_type": FAMILY, "text_config": {"eos_token_id": [7, 8]}, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_eos_token_ids(tmp_path) == (7, 8)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 6, "thinker_config": config}))
    assert read_eos_token_ids(tmp_path) == (6, 7, 8)


def test_a_wrong_size_is_refused_by_its_key(multimodal):
    config = read_config(multimodal[1])
    config["text_config"]["hidden_size"] = "32"
    with pytest.raises(ConfigError, match="hidden_size='32'"):
        shape_of(config)
    with pytest.raises(ConfigError, match="linear_num_key_heads=4 does not divide"):
        shape_of(
            {**config, "text_config": {**config["text_config"], "hidden_size": 32, "linear_num_key_heads": 4}}
        )


def test_vision_weights_of_gemma_4_are_skipped_with_a_word(tmp_path, caplog):
    import transformers

    text = make_checkpoint("gemma4", tmp_path / "text", seed=1)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16}
    config = transformers.Gemma4Config(
        text_config=tiny_config("gemma4").to_dict(), vision_config={**vision, **heads}, audio_config=None
    )
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    inner = transformers.AutoModelForCausalLM.from_pretrained(text)
    whole.model.language_model.load_state_dict(inner.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    assert shape_of(read_config(tmp_path / "whole")) == shape_of(read_config(text))
    with caplog.at_level("INFO"):
        found = load_model(tmp_path / "whole", torch.float32, torch.device("cpu"))
    assert "are not read: multi-token prediction or vision" in caplog.text
    expected = dict(load_model(text, torch.float32, torch.device("cpu")).named_parameters())
    for name, weight in found.named_parameters():
        assert torch.equal(weight, expected[name]), name
    adapter = make_adapter(
        "gemma4",
        tmp_path / "whole",
        tmp_path / "a",
        target_modules=r".*language_model.*\.(?:[qkvo]|gate|up|down)_proj",
        target_parameters=None,
    )
    with LLM(tmp_path / "whole", adapters={"a": str(adapter)}, dtype="float32", eager=True) as llm:
        answer = llm.generate([[5, 9, 60, 4]], ["a"], GREEDY)[0].token_ids
    assert answer == greedy_reference(tmp_path / "whole", adapter, [[5, 9, 60, 4]], 12, [answer]).tokens[0]


SEEDS = dict.fromkeys(LANGUAGE_MODELS, 0)


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """kind -> the multimodal checkpoint, and an adapter of attention, MLP, experts and gate."""
    known = {}

    def make(kind):
        if kind not in known:
            folder, family = tmp_path_factory.mktemp(kind), LANGUAGE_MODELS[kind]
            config = wrapped_language_model(kind, tiny_config(family).to_dict())
            base = save_random(family, config, folder / "base", SEEDS[kind])
            if kind == "kimi_k25":  # released names; transformers writes blocks
                file = base / "model.safetensors"
                _rename(file, {r"model\.blocks": "model.layers"}, file)
            leaves = "[qkvo]_proj|kv_b_proj|q_a_proj|kv_a_proj_with_mqa"
            if kind != "qwen3_omni_moe":  # no such modules
                leaves += "|gate_proj|up_proj|down_proj"
            chosen = {
                "target_modules": rf".*\.(?:{leaves})",
                "exclude_modules": ".*(?:visual|vision|audio).*",
            }
            experts = () if family in DENSE_FAMILIES else ("gate_up", "down", "router")
            adapter = make_adapter(family, base, folder / "a", 4, experts, **chosen)
            known[kind] = base, adapter
        return known[kind]

    return make


def _rename(file, names, to):
    tensors = load_file(file)
    for old, new in names.items():
        tensors = {re.sub(old, new, key): tensor for key, tensor in tensors.items()}
    save_file(tensors, to, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_wrapped_language_model_answers_as_transformers_and_peft_do(kind, wrapped, caplog):
    base, adapter = wrapped(kind)
    prompts, names = [[5, 9, 60, 4, 33], [17, 3, 3, 40], list(range(7, 40))], ["a", None, "a"]
    with (
        caplog.at_level("INFO"),
        LLM(
            *(base,),
            adapters={"a": str(adapter)},
            dtype="float32",
            eager=True,
            max_num_batched_tokens=9,
            max_num_seqs=4,
        ) as llm,
    ):
        found = llm.generate(prompts, names, GREEDY)
        again = llm.generate(prompts, names, GREEDY)
        assert llm.stats().prefix_hit_tokens > 0
    assert "are not read: multi-token prediction or vision" in caplog.text
    assert [one.token_ids for one in again] == [one.token_ids for one in found]
    for prompt, name, completion in zip(prompts, names, found, strict=True):
        expected = greedy_reference(base, name and adapter, [prompt], 12, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0]


ORDERS = {
    "the text model first": (
        "glm4v_moe",
        {r"^model\.language_model": "language_model.model", "^lm_head": "language_model.lm_head"},
    ),
    "the wrapper first": (
        "mistral3",
        {r"^language_model\.model": "model.language_model", r"^language_model\.lm_head": "lm_head"},
    ),
    "a whole omni model": ("qwen3_omni_moe", {"^": "thinker."}),
}
"""A multimodal model_type, and other names of its tensors."""


@pytest.mark.parametrize("order", ORDERS)
def test_each_order_of_names_has_the_same_weights(order, wrapped, tmp_path):
    kind, names = ORDERS[order]
    base, _ = wrapped(kind)
    config = read_config(base)
    if order == "a whole omni model":
        config = {"model_type": kind, "thinker_config": config}
    _rename(base / "model.safetensors", names, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(config) == shape_of(read_config(base))
    expected = dict(load_model(base, torch.float32, torch.device("cpu")).named_parameters())
    for name, weight in load_model(tmp_path, torch.float32, torch.device("cpu")).named_parameters():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_omni_moe"])
def test_an_adapter_of_the_text_model_alone_answers_as_that_of_the_whole(kind, wrapped, tmp_path):
    base, whole = wrapped(kind)
    (tmp_path / "a").mkdir()
    fields = json.loads((whole / "adapter_config.json").read_text())
    name = "adapter_model.safetensors"
    _rename(whole / name, {r"\.language_model": ""}, tmp_path / "a" / name)
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(fields))
    with LLM(base, adapters={"w": str(whole), "a": str(tmp_path / "a")}, dtype="float32", eager=True) as llm:
        one, other = llm.generate([[5, 9, 60, 4, 33]] * 2, ["w", "a"], GREEDY)
    assert one.token_ids == other.token_ids


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral3", "text_config": {"model_type": "mamba"}}, "model_type='mamba'"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "model_type='llava'"),
    ],
)
def test_an_unknown_wrapper_or_language_model_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(config)
