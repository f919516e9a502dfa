# SPDX-License-Identifier: Apache-2.0
"""What a training loop has at hand, PEFT's own objects, published as they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.peft.reader import pack_state_dict, read_adapter
from moe_lora.adapters.registry.register import register_adapter
from moe_lora.adapters.registry.registry import Registry
from moe_lora.core.errors import AdapterError
from tests.adapters.dense import assert_same_deltas, packed_deltas, peft_deltas
from tests.families import FAMILIES, load_model, make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained(model_dir: Path, adapter_names: tuple[str, ...] = ("default",), **config: Any) -> Any:
    """A PEFT model as a training loop has it, with random LoRA weights."""
    from peft import LoraConfig, get_peft_model

    model = load_model(model_dir)
    if vocabulary := config.pop("vocabulary", None):
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    fields = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "o_proj"], **config})
    peft_model = get_peft_model(model, fields, adapter_name=adapter_names[0])
    for name in adapter_names[1:]:
        peft_model.add_adapter(name, fields)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(peft_model.named_parameters()):
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 5)
    return peft_model


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_seven_usual_names_are_served_as_peft_does_where_some_match_nothing(
    family, checkpoint, shape_of, tmp_path, caplog
):
    adapter = make_adapter(
        family, checkpoint(family), tmp_path / "a", target_modules=SEVEN, target_parameters=None
    )
    shape = shape_of(family)
    with caplog.at_level(logging.WARNING):
        packed = AdapterContents(shape, torch.float32).read("a", str(adapter))
    assert packed.targets == ("q", "k", "v", "o")
    assert_same_deltas(packed_deltas(packed, shape), peft_deltas(family, checkpoint(family), adapter))
    [warning] = packed.warnings
    assert "target_modules: 'down_proj', 'gate_proj', 'up_proj' match nothing" in warning
    ours = [record for record in caplog.records if record.name.startswith("moe_lora")]
    assert [record.getMessage() for record in ours] == [warning]


def test_a_parameter_that_is_nowhere_is_a_warning_and_its_tensor_an_error(checkpoint, shape_of, tmp_path):
    adapter = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a", targets=("qkv", "down"))
    fields = json.loads((adapter / "adapter_config.json").read_text())
    fields["target_parameters"].append("experts.gate_up")
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    shape = shape_of("mixtral")
    assert "'experts.gate_up'" in read_adapter(adapter, shape, torch.float32).warnings[0]
    stray = {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}
    with pytest.raises(AdapterError, match=r"mlp\.up_proj.*matches no module"):
        pack_state_dict(stray, fields | {"target_modules": SEVEN}, shape, torch.float32, "x")


def test_seven_names_with_modules_of_experts_in_the_file_are_experts_that_must_all_be_there(
    checkpoint, shape_of, tmp_path
):
    whole = make_adapter(
        "qwen3_moe", checkpoint("qwen3_moe"), tmp_path / "a", form="per_expert", target_modules=SEVEN
    )
    packed = read_adapter(whole, shape_of("qwen3_moe"), torch.float32)
    assert packed.targets == ("q", "k", "v", "o", "gate", "up", "down")
    assert packed.warnings == ()


def test_seven_names_without_any_module_of_an_expert_in_the_file_are_those_of_attention(
    checkpoint, shape_of, tmp_path
):
    """As peft 0.18 trains them where transformers 5 keeps experts as parameters."""
    base = checkpoint("qwen3_moe")
    attention = make_adapter(
        "qwen3_moe", base, tmp_path / "a", targets=("qkv", "o"), form="per_expert", target_modules=SEVEN
    )
    packed = read_adapter(attention, shape_of("qwen3_moe"), torch.float32)
    assert packed.targets == ("q", "k", "v", "o")
    assert "'gate_proj'" in packed.warnings[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_dict_of_a_whole_peft_model_is_its_adapter(family, checkpoint, shape_of, tmp_path):
    from peft import get_peft_model_state_dict

    targets = ["Wqkv", "out_proj"] if family == "dbrx" else SEVEN
    experts = {"dbrx": ["mlp.w1"], "llama": None}.get(family, ["experts.gate_up_proj", "experts.down_proj"])
    model = trained(checkpoint(family), target_modules=targets, target_parameters=experts)
    model.save_pretrained(str(tmp_path / "saved"))
    shape = shape_of(family)
    saved = read_adapter(tmp_path / "saved", shape, torch.float32)
    config = model.peft_config["default"]
    for tensors in (model.state_dict(), get_peft_model_state_dict(model)):
        for given in (config, config.to_dict(), model.peft_config):
            packed = pack_state_dict(tensors, given, shape, torch.float32, "x")
            assert packed.content_hash == saved.content_hash


def test_a_registry_takes_the_objects_of_a_training_loop(checkpoint, shape_of, tmp_path):
    model, base = trained(checkpoint("mixtral")), checkpoint("mixtral")
    with Registry(tmp_path / "registry", create=True) as registry:
        added = register_adapter(
            registry, "x", model.state_dict(), model.peft_config["default"], model_dir=base
        )
        stored = read_adapter(added.path, shape_of("mixtral"), torch.float32)
    given = pack_state_dict(model.state_dict(), model.peft_config, shape_of("mixtral"), torch.float32, "x")
    assert stored.content_hash == given.content_hash


@pytest.mark.parametrize(
    ("made_with", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"vocabulary": 100}, r"\[100, 32\], the base model's vocabulary has 96 tokens: it was resized"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"bias": "lora_only"}, "bias"),
        ({"adapter_names": ("first", "second")}, "get_peft_model_state_dict"),
    ],
)
def test_what_no_adapter_holds_is_refused_for_what_it_is(made_with, reason, checkpoint, shape_of):
    model = trained(checkpoint("llama"), **made_with)
    config = next(iter(model.peft_config.values()))
    with pytest.raises(AdapterError, match=reason):
        pack_state_dict(model.state_dict(), config, shape_of("llama"), torch.float32, "x")


@pytest.mark.parametrize("config", ["adapter_config.json", 5, ["r"]])
def test_configs_of_other_kinds_are_refused(config, shape_of):
    with pytest.raises(AdapterError, match="LoraConfig, found"):
        pack_state_dict({}, config, shape_of("llama"), torch.float32, "x")


def test_the_configs_of_several_adapters_are_none(checkpoint, shape_of):
    model = trained(checkpoint("llama"), adapter_names=("first", "second"))
    with pytest.raises(AdapterError, match=r"2 adapters [(]first, second[)]"):
        pack_state_dict({}, model.peft_config, shape_of("llama"), torch.float32, "x")


@pytest.mark.parametrize(
    ("made_with", "saved_with", "reason"),
    [
        ({}, {"save_embedding_layers": True}, "save_embedding_layers=False"),
        ({"vocabulary": 100}, {}, "it was resized for training"),
        (
            {"target_modules": ["q_proj", "embed_tokens"], "vocabulary": 100},
            {},
            "it was resized for training",
        ),
        ({"target_modules": ["q_proj", "lm_head"], "vocabulary": 100}, {}, "it was resized for training"),
    ],
)
def test_embeddings_that_peft_saves_with_an_adapter_are_refused_for_what_they_are(
    made_with, saved_with, reason, checkpoint, shape_of, tmp_path
):
    trained(checkpoint("mixtral"), **made_with).save_pretrained(str(tmp_path / "a"), **saved_with)
    with pytest.raises(AdapterError, match=reason):
        read_adapter(tmp_path / "a", shape_of("mixtral"), torch.float32)


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        ("unsloth/mixtral-8x7b-bnb-4bit", "bnb-4bit"),
        ("org/Mixtral-8x7B-FP8", "FP8"),
        ("org/Mixtral-8x7B-AWQ/", "AWQ"),
        ("mistralai/Mixtral-8x7B-v0.1", None),
        ("org/waypoint8-sprint4", None),
        (None, None),
    ],
)
def test_an_adapter_trained_beside_quantised_weights_is_said_to_be(
    base, kind, checkpoint, shape_of, tmp_path
):
    adapter = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a")
    fields = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    warnings = read_adapter(adapter, shape_of("mixtral"), torch.float32).warnings
    assert len(warnings) == (kind is not None)
    assert all(f"quantised as {kind};" in warning for warning in warnings)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_adapter_whose_base_lies_here_quantised_is_said_to_be(is_wrapped, checkpoint, shape_of, tmp_path):
    adapter = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a")
    model = json.loads((checkpoint("mixtral") / "config.json").read_text())
    section = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(
        json.dumps(model | ({"text_config": section} if is_wrapped else section))
    )
    fields = json.loads((adapter / "adapter_config.json").read_text())
    fields["base_model_name_or_path"] = str(tmp_path)
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    [warning] = read_adapter(adapter, shape_of("mixtral"), torch.float32).warnings
    assert "quantised as bitsandbytes" in warning
