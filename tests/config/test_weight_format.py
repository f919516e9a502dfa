# SPDX-License-Identifier: Apache-2.0
"""What planners are told of a quantised base."""

from __future__ import annotations

import json

import pytest
import torch

from moe_lora.config.weight_format import weight_format
from moe_lora.core.progress import silent
from moe_lora.core.weight_format import WeightFormat
from moe_lora.core.wrong_files import read_config
from moe_lora.models.loader import load_model
from moe_lora.models.quantised_checkpoint import quantise_checkpoint
from moe_lora.models.quantised_weight import QuantisedWeight, quantisation_of
from tests.families import make_checkpoint

GROUP = {"weights": {"num_bits": 8, "type": "int"}}
ZEROS = {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}}
LAYERS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("quantize", "group", "head", "name"),
    [
        ("int8", None, False, "int8"),
        ("int4", 32, True, "int4-32+head"),
        ("int4", None, False, "int4-64"),
        ("fp8", 128, False, "fp8-128"),
    ],
)
def test_settings_and_what_is_written_have_one_name_and_the_size_that_is_held(
    quantize, group, head, name, tied, tmp_path
):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": tied}
    model_dir = make_checkpoint("llama", tmp_path / "base", **sizes)
    found = weight_format(read_config(model_dir), quantize, group, head)
    assert found.name == name
    assert found.head == head
    quantisation = quantisation_of(quantize, group, head)
    quantise_checkpoint(model_dir, tmp_path / "out", quantisation, torch.bfloat16, silent)
    written = read_config(tmp_path / "out")
    assert weight_format(written) == found
    assert ("lm_head" in written["quantization_config"]["ignore"]) == (not head)
    model = load_model(model_dir, torch.bfloat16, torch.device("cpu"), quantisation=quantisation)
    for weight in (module for module in model.modules() if isinstance(module, QuantisedWeight)):
        bits = 8 * (weight.data.nbytes + weight.scale.nbytes) / weight.shape.numel()
        assert bits == pytest.approx(found.expert_bits, rel=0.03)


@pytest.mark.parametrize(
    ("family", "section", "expected"),
    [
        ("gpt_oss", {"quant_method": "mxfp4"}, WeightFormat("mxfp4", None, 4.25)),
        ("qwen3_moe", BLOCKS, WeightFormat("fp8-128", 8, 8)),
        ("dbrx", BLOCKS, WeightFormat("fp8-128", 8, None)),
        (
            "llama",
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
            WeightFormat("int8", 8, 8),
        ),
        ("llama", {"quant_method": "awq"}, WeightFormat()),
        ("llama", {**LAYERS, "ignore": []}, WeightFormat("int8+head", 8, 8)),
        ("llama", {**LAYERS, "ignore": ["re:.*lm_head"]}, WeightFormat("int8", 8, 8)),
        ("tied llama", {**LAYERS, "ignore": None}, WeightFormat("int8", 8, 8)),
        ("llama", {**LAYERS, "config_groups": {"group_0": ZEROS}}, WeightFormat("int4-32+head", 4.75, 4.75)),
        ("llama", {**BLOCKS, "weight_block_size": [128]}, WeightFormat("fp8", 8, 8)),
    ],
)
def test_stored_schemes(family, section, expected):
    tied, _, family = family.rpartition(" ")
    config = json.loads(json.dumps({"model_type": family, "quantization_config": section}))
    config["tie_word_embeddings"] = tied == "tied"
    assert weight_format(config) == expected
    assert weight_format({"model_type": family, "text_config": config}) == expected
    assert weight_format(config, "none") == WeightFormat()
