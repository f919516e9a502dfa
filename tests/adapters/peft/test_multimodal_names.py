# SPDX-License-Identifier: Apache-2.0
"""Configs and files of adapters by the module names of a multimodal class, against peft."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.adapters.registry.base_model import model_shape
from moe_lora.cli.main import main
from moe_lora.core.errors import AdapterError
from tests.adapters.dense import assert_same_deltas, packed_deltas, peft_deltas
from tests.adapters.peft.test_outer_sites import outer_adapter
from tests.families import load_model, make_adapter, save_random, tiny_config
from tests.families.wrapped import wrapped_config, wrapped_language_model

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILY = "qwen3"
KEY = "tie_word_embeddings"
STACK = "model.language_model.layers"
Q_PROJ = f"{STACK}.0.self_attn.q_proj"
EMBEDDING = "model.language_model.embed_tokens"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = wrapped_language_model("qwen3_vl", tiny_config(FAMILY).to_dict())
    return save_random(FAMILY, config, tmp_path_factory.mktemp("base"))


CONFIGS = {
    "a rank of a whole name": {"rank_pattern": {Q_PROJ: 2}},
    "an alpha of a whole name": {"alpha_pattern": {Q_PROJ: 2}},
    "a rank of the language model's name": {"rank_pattern": {Q_PROJ.removeprefix("model."): 2}},
    "an excluded whole name": {"exclude_modules": [Q_PROJ]},
    "an excluding expression": {"exclude_modules": r"model\.language_model\.layers\.0\..*"},
    "an expression that leaves a layer out": {
        "target_modules": r"^(?!model\.language_model\.layers\.0\.).*\.(?:q_proj|v_proj)"
    },
    "a pair of the embedding by its whole name": {"target_modules": [EMBEDDING, "q_proj"]},
    "rows of the embedding by its whole name": {"trainable_token_indices": {EMBEDDING: [3, 5]}},
    "rows by the language model's name": {
        "trainable_token_indices": {EMBEDDING.removeprefix("model."): [3, 5]}
    },
    "the saved embedding by its whole name": {"modules_to_save": [EMBEDDING]},
    "a pair of the embedding alone, and an excluded whole name": {
        "target_modules": ["embed_tokens", "q_proj"],
        "exclude_modules": [f"{STACK}.{layer}.self_attn.q_proj" for layer in range(2)],
    },
    "rows of the embedding, a pair of the head, and an excluded whole name": {
        "target_modules": ["lm_head", "q_proj"],
        "exclude_modules": [f"{STACK}.{layer}.self_attn.q_proj" for layer in range(2)],
        "trainable_token_indices": [3, 5],
    },
}


@pytest.mark.parametrize("case", CONFIGS)
def test_names_of_a_multimodal_class_in_the_config_are_as_peft_reads_them(case, base, tmp_path):
    config = {"target_modules": ["q_proj", "v_proj"], **CONFIGS[case]}
    adapter, shape = make_adapter(FAMILY, base, tmp_path / "a", **config), model_shape(base)
    found = packed_deltas(read_adapter(adapter, shape, torch.float32, base_dir=base), shape)
    assert_same_deltas(found, peft_deltas(FAMILY, base, adapter))


@pytest.mark.parametrize("tokens", [[3, 5], {"embed_tokens": [3, 5], "lm_head": [3, 5]}])
@pytest.mark.parametrize("stated", [{}, {KEY: True}])
def test_rows_reach_the_own_head_of_a_class_that_writes_true(stated, tokens, tmp_path):
    """PEFT adds the rows to each by the whole config's key, and each has other rows before."""
    whole = wrapped_language_model("mistral3", tiny_config("mistral", tie_word_embeddings=False).to_dict())
    whole.tie_word_embeddings = False
    base = save_random("mistral", whole, tmp_path / "base")
    fields = json.loads((base / "config.json").read_text())
    del fields[KEY]
    (base / "config.json").write_text(json.dumps(fields | stated))
    config = {
        "target_modules": ["q_proj"],
        "exclude_modules": ".*vision.*",
        "trainable_token_indices": tokens,
    }
    adapter, shape = make_adapter("mistral", base, tmp_path / "a", **config), model_shape(base)
    found = packed_deltas(read_adapter(adapter, shape, torch.float32, base_dir=base), shape)
    assert_same_deltas(found, peft_deltas("mistral", base, adapter))


def test_a_missing_module_is_named_as_in_the_file(base, tmp_path):
    adapter = make_adapter(FAMILY, base, tmp_path / "a", target_modules=["q_proj", "v_proj"])
    tensors = load_file(adapter / WEIGHTS_FILE)
    save_file({key: one for key, one in tensors.items() if Q_PROJ not in key}, adapter / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=rf"no tensors for {Q_PROJ}, "):
        read_adapter(adapter, model_shape(base), torch.float32)


def test_missing_rows_of_the_embedding_are_named_as_in_the_file(base, tmp_path):
    adapter = outer_adapter(FAMILY, base, tmp_path / "a", trainable_token_indices=[3, 5])
    tensors = load_file(adapter / WEIGHTS_FILE)
    save_file({key: one for key, one in tensors.items() if ".lora_" in key}, adapter / WEIGHTS_FILE)
    with pytest.raises(
        AdapterError, match=rf"trainable_token_indices names {EMBEDDING}, and the file has no"
    ):
        read_adapter(adapter, model_shape(base), torch.float32, base_dir=base)


def converted(source, target, base):
    result = CliRunner().invoke(main, ["adapters", "convert", str(source), str(target), "--model", str(base)])
    assert result.exit_code == 0, result.output
    return target


@pytest.mark.parametrize("case", ["layers", "rows of the embedding", "the saved embedding and head"])
def test_a_converted_adapter_of_a_multimodal_class_changes_that_class(case, base, tmp_path):
    config = {
        "layers": {
            "target_modules": r".*language_model.*\.(?:[qkvo]|down)_proj",
            "rank_pattern": {Q_PROJ: 2},
        },
        "rows of the embedding": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
        "the saved embedding and head": {
            "target_modules": ["q_proj"],
            "modules_to_save": ["lm_head", "embed_tokens"],
        },
    }[case]
    source = make_adapter(FAMILY, base, tmp_path / "a", **config)
    target = converted(source, tmp_path / "b", base)
    assert_same_deltas(peft_deltas(FAMILY, base, target), peft_deltas(FAMILY, base, source))


def test_a_converted_adapter_has_no_targets_in_the_vision_part(tmp_path):
    """Gemma 3's vision part has a q_proj too."""
    fields = {key: value for key, value in tiny_config("gemma3").to_dict().items() if key != "model_type"}
    base = save_random("gemma3", wrapped_config("gemma3", fields), tmp_path / "base")
    targets = r".*language_model.*\.(?:q|v)_proj"
    source = make_adapter("gemma3", base, tmp_path / "a", target_modules=targets)
    target = converted(source, tmp_path / "b", base)
    model = PeftModel.from_pretrained(load_model(base), str(target))
    wrapped = {name for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert wrapped
    assert not any("vision" in name for name in wrapped)
    assert_same_deltas(peft_deltas("gemma3", base, target), peft_deltas("gemma3", base, source))


@pytest.mark.parametrize(
    "front", ["llm.model.", "model.text_model.", "language_model.", "language_tower.model."]
)
def test_a_front_that_a_conversion_would_lose_is_refused(front, checkpoint, tmp_path):
    source = outer_adapter("llama", checkpoint("llama"), tmp_path / "a")
    tensors = load_file(source / WEIGHTS_FILE)
    renamed = {key.replace("model.model.model.", f"model.model.{front}"): one for key, one in tensors.items()}
    save_file(renamed, source / WEIGHTS_FILE)
    command = ["adapters", "convert", str(source), str(tmp_path / "b"), "--model", str(checkpoint("llama"))]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert f"{front}layers.0" in result.output


ORDERS = {
    "the wrapper first": ("model.language_model.", ""),
    "the text model first": ("language_model.model.", "language_model."),
    "a whole omni model": ("thinker.model.", "thinker."),
}
"""In place of `model.`, and before the head's name."""


@pytest.mark.parametrize(
    "modules", [(), ("lm_head",), ("embed_tokens",)], ids=["layers", "head", "embedding"]
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_converted_adapter_keeps_the_names_of_its_class(order, modules, checkpoint, shape_of, tmp_path):
    plain = outer_adapter("llama", checkpoint("llama"), tmp_path / "plain", *modules)
    text, front = ORDERS[order]
    tensors = {
        key.replace("model.model.model.", f"model.model.{text}", 1).replace(
            "model.model.lm_head", f"model.model.{front}lm_head"
        ): tensor
        for key, tensor in load_file(plain / WEIGHTS_FILE).items()
        if not (modules and ".layers." in key)
    }
    fields = json.loads((plain / CONFIG_FILE).read_text())
    fields["target_modules"] = [*modules] or fields["target_modules"]
    source, shape = tmp_path / "a", shape_of("llama")
    source.mkdir()
    (source / CONFIG_FILE).write_text(json.dumps(fields))
    save_file(tensors, source / WEIGHTS_FILE)
    target = converted(source, tmp_path / "b", checkpoint("llama"))
    assert load_file(target / WEIGHTS_FILE).keys() == {key for key in tensors if "base_layer" not in key}
    found, expected = (
        packed_deltas(read_adapter(one, shape, torch.float32), shape) for one in (target, source)
    )
    assert_same_deltas(found, expected)
