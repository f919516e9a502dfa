from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.core.errors import ConfigError
from moe_lora.models.loader import SINGLE_NAME, load_model
from moe_lora.models.weights import dequantise
from tests.families import make_checkpoint


def test_hand_worked_block():
    """Byte 0x71: low nibble 1 = 0.5 first, then high nibble 7 = 6; scale byte 127 = 1, 129 = 4, 126 = 1/2."""
    blocks = torch.zeros(3, 16, dtype=torch.uint8)
    blocks[0, 0], blocks[1, 0], blocks[2, 15] = 0x71, 0x9A, 0xF3
    out = dequantise(blocks, torch.tensor([127, 129, 126], dtype=torch.uint8))
    assert out.shape == (96,)
    assert out[:3].tolist() == [0.5, 6.0, 0.0]
    assert out[32:35].tolist() == [-1.0 * 4, -0.5 * 4, 0.0]
    assert out[94:].tolist() == [1.5 / 2, -6.0 / 2]
    assert int(out.count_nonzero()) == 6


def test_every_value_code():
    codes = torch.arange(16, dtype=torch.uint8)
    out = dequantise((codes | (codes << 4))[None], torch.tensor([127], dtype=torch.uint8))
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert out[::2].tolist() == out[1::2].tolist() == positive + [-value for value in positive]


def random_quantised(*shape, seed):
    """Blocks [*shape, 16] and scales near 1 [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
    return blocks, torch.randint(122, 126, shape, generator=generator).byte()


def transformers_dequantise():
    return pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors


def test_equals_transformers():
    blocks, scales = random_quantised(3, 8, 2, seed=0)
    expected = transformers_dequantise()(blocks, scales, dtype=torch.float32)  # transposed
    assert torch.equal(dequantise(blocks, scales).mT, expected)


@pytest.fixture
def pair(tmp_path):
    """A GPT-OSS checkpoint with MXFP4 experts, and the same one as transformers dequantises it."""
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    make_checkpoint("gpt_oss", plain, intermediate_size=64, num_hidden_layers=1)
    tensors = load_file(plain / SINGLE_NAME)
    packed = dict(tensors)
    for seed, name in enumerate(("gate_up_proj", "down_proj")):
        key = f"model.layers.0.mlp.experts.{name}"
        _, width, out = packed.pop(key).shape  # stored as [E, in, out]
        blocks, scales = random_quantised(4, out, width // 32, seed=seed)
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        tensors[key] = transformers_dequantise()(blocks, scales, dtype=torch.float32)
    save_file(tensors, plain / SINGLE_NAME)
    quantised.mkdir()
    save_file(packed, quantised / SINGLE_NAME)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (quantised / "config.json").write_text(json.dumps(config))
    return plain, quantised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_checkpoint_loads_as_its_dequantised_twin(pair, dtype):
    plain, quantised = (load_model(path, dtype, torch.device("cpu")) for path in pair)
    expected = dict(plain.named_parameters())
    for name, parameter in quantised.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_missing_scales_are_named(pair):
    tensors = load_file(pair[1] / SINGLE_NAME)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, pair[1] / SINGLE_NAME)
    with pytest.raises(ConfigError, match="down_proj_scales"):
        load_model(pair[1], torch.float32, torch.device("cpu"))
