# SPDX-License-Identifier: Apache-2.0
"""The language model of a multimodal checkpoint is served, and its other tensors are skipped with a word."""

from __future__ import annotations

import json

import pytest
import torch

from moe_lora import LLM, SamplingParams
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.text.tokenizer_files import read_eos_token_ids
from moe_lora.families import cut_to, shape_of
from moe_lora.models.loader import load_model
from tests.families import make_adapter, make_checkpoint, tiny_config
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
