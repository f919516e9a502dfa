# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import SINGLE_NAME
from moe_lora.models.loader import load_model
from moe_lora.models.quantised_weight import QuantisedWeight
from moe_lora.models.stored_weight import mxfp4
from tests.families import make_adapter
from tests.oracle import greedy_reference
from tests.stored_checkpoints import dequantised_blocks, mxfp4_pair, random_blocks

from .harness import Harness
from .test_oracle import make_prompts


def dequantise(blocks, scales):
    """What blocks [G, 16] of one output stand for: [32 * G]."""
    return mxfp4(blocks[None], scales[None]).dequantised(slice(0, 1), torch.float32)[0]


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


def test_equals_transformers():
    blocks, scales = random_blocks(3, 8, 2, seed=0)
    expected = dequantised_blocks(blocks, scales, dtype=torch.float32)  # transposed
    for weight, scale, matrix in zip(blocks, scales, expected, strict=True):
        assert torch.equal(mxfp4(weight, scale).dequantised(slice(0, 8), torch.float32).T, matrix)


@pytest.fixture
def pair(tmp_path):
    return mxfp4_pair(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_stay_packed_and_stand_for_the_dequantised(pair, dtype):
    plain, packed = (load_model(path, dtype, torch.device("cpu")) for path in pair)
    expected = dict(plain.named_parameters())
    held = {name: m for name, m in packed.named_modules() if isinstance(m, QuantisedWeight)}
    assert held.keys() == {"layers.0.mlp.gate_up.weight", "layers.0.mlp.down.weight"}
    for name, weight in held.items():
        assert (weight.form.name, weight.data.dtype) == ("mxfp4", torch.uint8)
        assert weight.scale.nbytes * 32 == expected[name].numel()
        assert torch.equal(weight.dequantised(), expected.pop(name))
    for name, parameter in packed.named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected


def test_mixed_batch_over_packed_experts_continues_as_over_the_dequantised(pair, tmp_path):
    adapters = [make_adapter("gpt_oss", pair[0], tmp_path / str(n), n, seed=n) for n in (4, 8)]
    slots, prompts = (-1, 0, 1, -1, 0, 1, -1), make_prompts()
    found = Harness(pair[1], adapters).greedy(prompts, slots, 24)
    for slot, prompt, tokens in zip(slots, prompts, found, strict=True):
        expected = greedy_reference(pair[0], None if slot < 0 else adapters[slot], [prompt], 24, [tokens])
        expected.check_margins()
        assert tuple(tokens) == expected.tokens[0], (slot, len(prompt))


def test_scale_that_is_no_number_is_named(pair):
    tensors = load_file(pair[1] / SINGLE_NAME)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][2, 1, 0] = 255
    save_file(tensors, pair[1] / SINGLE_NAME)
    with pytest.raises(ConfigError, match=r"down_proj_blocks in .* can't be read: a scale is not a number"):
        load_model(pair[1], torch.float32, torch.device("cpu"))


def test_missing_scales_are_named(pair):
    tensors = load_file(pair[1] / SINGLE_NAME)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, pair[1] / SINGLE_NAME)
    with pytest.raises(ConfigError, match="down_proj_scales"):
        load_model(pair[1], torch.float32, torch.device("cpu"))
