# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that come quantised, against transformers and peft over the weights that they stand for."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.config.weight_format import weight_format
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import SINGLE_NAME, read_config
from moe_lora.models.checkpoint import Checkpoint, MappedFile
from moe_lora.models.loader import load_model
from moe_lora.models.quantised_weight import QuantisedWeight, quantisation_of
from tests.families import FAMILIES, make_checkpoint, shard_of
from tests.grids import diagonal
from tests.oracle import greedy_reference, reference_logits
from tests.stored_checkpoints import (
    BLOCK,
    GROUP,
    KINDS,
    SCHEMES,
    TORCHAO,
    compressed,
    fused,
    integers,
    set_quantisation,
    stored_pair,
)

from .harness import Harness
from .test_oracle import MAX_LOGIT_DIFFERENCE, make_prompts
from .test_quantised import CPU, NUM_TOKENS, SLOTS, base  # noqa: F401  (the fixture)

QUICK = {
    kind: family
    for kind, family in zip(KINDS, FAMILIES * 2, strict=False)
    if kind in ("w4a16-asymmetric", "w8a16-groups", "fp8", "torchao-int4")
}
"""Further kinds: `test_what_is_held_is_what_is_stored`."""
CASES = [
    pytest.param(family, kind, marks=() if QUICK.get(kind) == family else pytest.mark.slow)
    for kind in KINDS
    for family in FAMILIES
]
FORMS = {"w4": "int4", "w8": "int8", "fp8": "fp8", "torchao-int8": "int8", "torchao-int4": "int4"}
OTHER_SEEDS = {("qwen3_moe", "w8a16-groups"): 5, ("dbrx", "fp8"): 5, ("gpt_oss", "torchao-int4"): 5}
"""Where two tokens or two experts come too near with the usual one."""
EXPERTS_STAY = ("gpt_oss", "dbrx")
"""Their experts lie transposed or interleaved, so that quantisers of linear layers leave them."""


def held(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantisedWeight)}


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_mixed_batch_continues_as_peft_does_over_what_is_stored(family, kind, base, tmp_path):  # noqa: F811
    model_dir, adapters = base(family, OTHER_SEEDS.get((family, kind)))
    stored, plain = stored_pair(model_dir, kind, tmp_path)
    prompts, harness = make_prompts(), Harness(stored, adapters)
    weights = held(harness.model)
    assert len(weights) == (4 if family not in EXPERTS_STAY else 2) * harness.model.spec.shape.num_layers
    assert {weight.form.name for weight in weights.values()} == {
        form for start, form in FORMS.items() if kind.startswith(start)
    } or kind == "torchao-fp8"
    _, logits = harness.prefill(prompts, SLOTS)
    found = Harness(stored, adapters).greedy(prompts, SLOTS, NUM_TOKENS)
    for slot, prompt, rows, tokens in zip(SLOTS, prompts, logits, found, strict=True):
        adapter = None if slot < 0 else adapters[slot]
        expected = reference_logits(plain, adapter, prompt)
        assert (rows - expected).abs().max() < MAX_LOGIT_DIFFERENCE, slot
        greedy = greedy_reference(plain, adapter, [prompt], NUM_TOKENS, [tokens])
        greedy.check_margins()
        assert tuple(tokens) == greedy.tokens[0], (slot, len(prompt))


@pytest.mark.parametrize(("kind", "dtype"), diagonal(list(KINDS), [torch.float32, torch.bfloat16]))
def test_what_is_held_is_what_is_stored(kind, dtype, base, tmp_path):  # noqa: F811
    """Also where it is dequantised for good, and on a rank that has some experts only."""
    stored, plain = stored_pair(base("mixtral")[0], kind, tmp_path)
    expected = dict(load_model(plain, dtype, CPU).named_parameters())
    weights = held(load_model(stored, dtype, CPU))
    part = held(load_model(stored, dtype, CPU, shard_of(stored, expert_parallel=2, dist_rank=1)))
    assert len(weights) == 8
    for name, weight in weights.items():
        assert torch.equal(weight.dequantised(), expected[name]), name
        own = expected[name][2:] if weight.dequantised().dim() == 3 else expected[name]
        assert torch.equal(part[name].dequantised(), own), name
    dequantised = load_model(stored, dtype, CPU, quantisation=quantisation_of("none", None, False))
    for name, weight in dequantised.named_parameters():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("kind", ["fp8", "torchao-int8"])
def test_values_in_the_files_form_are_read_into_place(kind, base, tmp_path, monkeypatch):  # noqa: F811
    stored, _ = stored_pair(base("mixtral")[0], kind, tmp_path)
    read, made = [], MappedFile.read_into

    def noted(file, key, out):
        read.append(out.dtype)
        made(file, key, out)

    monkeypatch.setattr(MappedFile, "read_into", noted)
    weights = held(load_model(stored, torch.bfloat16, CPU))
    num_matrices = sum(weight.data.shape[0] if weight.data.dim() == 3 else 1 for weight in weights.values())
    assert read.count(next(iter(weights.values())).data.dtype) >= num_matrices


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_a_file_that_is_cut_during_its_reads_is_named(kind, base, tmp_path, monkeypatch):  # noqa: F811
    stored = stored_pair(base("mixtral")[0], "fp8", tmp_path)[kind == "plain"]
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match=rf"{SINGLE_NAME} was cut while it was read"):
        load_model(stored, torch.float32, CPU)


@pytest.mark.parametrize("kind", TORCHAO)
def test_experts_of_one_tensor_are_read_as_those_of_one_each(kind, base, tmp_path):  # noqa: F811
    model_dir = shutil.copytree(base("mixtral")[0], tmp_path / "fused")
    save_file(fused(load_file(model_dir / SINGLE_NAME)), model_dir / SINGLE_NAME)
    stored, plain = stored_pair(model_dir, kind, tmp_path)
    expected = dict(load_model(plain, torch.float32, CPU).named_parameters())
    weights = held(load_model(stored, torch.float32, CPU))
    assert len(weights) == 8
    for name, weight in weights.items():
        assert torch.equal(weight.dequantised(), expected[name]), name


@pytest.mark.parametrize("strategy", ["block", "tensor"])
def test_compressed_floats_are_read(strategy, base, tmp_path):  # noqa: F811
    stored, plain = stored_pair(base("llama")[0], "fp8", tmp_path)
    tensors, meant = load_file(stored / SINGLE_NAME), load_file(plain / SINGLE_NAME)
    for key in [key for key in tensors if key.endswith("_scale_inv")]:
        scale, weight = tensors.pop(key), key.removesuffix("_scale_inv")
        if strategy == "tensor":
            scale = scale[:1, 0]
            meant[weight] = tensors[weight].float() * scale
        tensors[key.removesuffix("_inv")] = scale
    save_file(tensors, stored / SINGLE_NAME)
    save_file(meant, plain / SINGLE_NAME)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [BLOCK, BLOCK]}
    group = {"targets": ["Linear"], "weights": weights}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    set_quantisation(stored, {**section, "config_groups": {"group_0": group}})
    expected = dict(load_model(plain, torch.float32, CPU).named_parameters())
    weights = held(load_model(stored, torch.float32, CPU))
    assert len(weights) == 8
    for name, weight in weights.items():
        assert torch.equal(weight.dequantised(), expected[name]), name
    if strategy == "tensor":
        key = "model.layers.1.mlp.down_proj.weight_scale"
        tensors[key] = tensors[key].repeat(2)
        save_file(tensors, stored / SINGLE_NAME)
        with pytest.raises(
            ConfigError, match=r"down_proj\.weight in .* its scales are \[2\] where one belongs to"
        ):
            load_model(stored, torch.float32, CPU)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_older_files_are_whole_bytes(bits, base, tmp_path, monkeypatch):  # noqa: F811
    scheme = compressed(bits, GROUP, True), lambda w: integers(w, bits, GROUP, True, older=True)
    monkeypatch.setitem(SCHEMES, "older", scheme)
    stored, plain = stored_pair(base("llama")[0], "older", tmp_path)
    expected = dict(load_model(plain, torch.float32, CPU).named_parameters())
    weights = held(load_model(stored, torch.float32, CPU))
    assert len(weights) == 8
    for name, weight in weights.items():
        assert torch.equal(weight.dequantised(), expected[name]), name


def test_static_fp8_of_a_multimodal_checkpoint_is_read(base, tmp_path):  # noqa: F811
    """As Ministral 3 is published; the scale of the inputs has no effect."""
    stored, plain = stored_pair(base("llama")[0], "fp8", tmp_path)
    tensors, meant = load_file(stored / SINGLE_NAME), load_file(plain / SINGLE_NAME)
    for key in [key for key in tensors if key.endswith("_scale_inv")]:
        weight = key.removesuffix("_scale_inv")
        tensors[key] = tensors[key][0, 0].clone()
        meant[weight] = tensors[weight].float() * tensors[key]
        tensors[weight.replace("weight", "activation_scale")] = torch.tensor(0.5)
    tensors = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.ones(1)}, stored / SINGLE_NAME)
    save_file(meant, plain / SINGLE_NAME)
    section = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    text = {**read_config(plain), "quantization_config": section}
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    (stored / "config.json").write_text(json.dumps(whole))
    expected = dict(load_model(plain, torch.float32, CPU).named_parameters())
    weights = held(load_model(stored, torch.float32, CPU))
    assert len(weights) == 8
    for name, weight in weights.items():
        assert torch.equal(weight.dequantised(), expected[name]), name
    assert weight_format(whole).name == "fp8"


def test_asymmetric_weight_without_zero_points_is_refused(base, tmp_path):  # noqa: F811
    stored, _ = stored_pair(base("llama")[0], "w4a16-asymmetric", tmp_path)
    tensors, key = load_file(stored / SINGLE_NAME), "model.layers.1.mlp.down_proj.weight_zero_point"
    del tensors[key]
    save_file(tensors, stored / SINGLE_NAME)
    with pytest.raises(ConfigError, match=f"no tensor '{key}'"):
        load_model(stored, torch.float32, CPU)


def test_each_tensor_is_opened_once(base, tmp_path, monkeypatch):  # noqa: F811
    stored, _ = stored_pair(base("mixtral")[0], "w4a16-asymmetric", tmp_path)
    opened, shown, read = Counter(), [], Checkpoint.__getitem__

    def counted(checkpoint, key):
        opened[key] += 1
        return read(checkpoint, key)

    monkeypatch.setattr(Checkpoint, "__getitem__", counted)
    load_model(stored, torch.float32, CPU, show=lambda said, done, total: shown.append((done, total)))
    assert set(opened.values()) == {1}
    assert set(opened) == set(load_file(stored / SINGLE_NAME))
    assert 0 < shown[0][0] < shown[-1][0] == shown[-1][1]


def test_parts_of_several_formats_are_held_dequantised(base, tmp_path):  # noqa: F811
    stored, plain = stored_pair(base("llama")[0], "w4a16", tmp_path)
    tensors, key = load_file(stored / SINGLE_NAME), "model.layers.0.self_attn.k_proj.weight"
    for end in ("_packed", "_scale", "_shape"):
        del tensors[key + end]
    tensors[key] = load_file(plain / SINGLE_NAME)[key]
    save_file(tensors, stored / SINGLE_NAME)
    model = load_model(stored, torch.float32, CPU)
    assert len(held(model)) == 7
    expected = load_model(plain, torch.float32, CPU).layers[0].attention.qkv.weight
    assert torch.equal(model.layers[0].attention.qkv.weight, expected)


def test_stored_values_serve_a_dynamic_format_as_they_are(base, tmp_path):  # noqa: F811
    stored, plain = stored_pair(base("mixtral")[0], "w4a16", tmp_path)
    dynamic = quantisation_of("int4-dynamic", 32, False)
    expected = dict(load_model(plain, torch.float32, CPU).named_parameters())
    for name, weight in held(load_model(stored, torch.float32, CPU, quantisation=dynamic)).items():
        assert weight.form.dynamic
        assert torch.equal(weight.dequantised(), expected[name]), name


def set_scales(model_dir, change):
    """Change the scales of the checkpoint's weights, and their meaning."""
    tensors = load_file(model_dir / SINGLE_NAME)
    tensors |= {key: change(scale) for key, scale in tensors.items() if key.endswith("_scale_inv")}
    save_file(tensors, model_dir / SINGLE_NAME)


@pytest.mark.parametrize("form", ["bytes", "e8m0"])
@pytest.mark.parametrize("is_static", [False, True], ids=["blocks", "static"])
def test_scales_that_are_exponents_are_powers_of_two(form, is_static, base, tmp_path):  # noqa: F811
    stored, _ = stored_pair(base("llama")[0], "fp8", tmp_path)
    section = {**SCHEMES["fp8"][0], "scale_fmt": "ue8m0"}
    if is_static:
        section |= {"weight_block_size": None, "activation_scheme": "static"}
        set_scales(stored, lambda scale: scale[:1, :1].reshape(()).clone())
    set_quantisation(stored, section)
    set_scales(stored, lambda scale: scale.log2().round().exp2())
    expected = {name: one.dequantised() for name, one in held(load_model(stored, torch.float32, CPU)).items()}
    if form == "bytes":
        set_scales(stored, lambda scale: (scale.log2() + 127).to(torch.uint8))
    else:
        set_scales(stored, lambda scale: scale.to(torch.float8_e8m0fnu))
    found = held(load_model(stored, torch.float32, CPU))
    assert found.keys() == expected.keys() != set()
    for name, weight in found.items():
        assert torch.equal(weight.dequantised(), expected[name]), name


def group_with(**changes):
    section = json.loads(json.dumps(SCHEMES["w4a16"][0]))
    section["config_groups"]["group_0"] |= changes.pop("group", {})
    section["config_groups"]["group_0"]["weights"] |= changes
    return section


def transformed(location):
    apply = [{"targets": ["Linear"], "location": "weight_output"}, {"location": location}]
    groups = {"R1": {"type": "hadamard", "apply": apply}}
    return {**SCHEMES["w4a16"][0], "transform_config": {"config_groups": groups}}


@pytest.mark.parametrize("groups", [None, {}, {"R1": {"apply": []}}, "weights"])
def test_transforms_within_the_weights_have_no_effect(groups, base, tmp_path):  # noqa: F811
    stored, _ = stored_pair(base("llama")[0], "w4a16", tmp_path)
    section = transformed("weight_input")
    if groups != "weights":
        section["transform_config"]["config_groups"] = groups
    set_quantisation(stored, section)
    assert held(load_model(stored, torch.float32, CPU))


def floats_with(**changes):
    section = group_with(num_bits=8, type="float", strategy="block", **changes)
    return {**section, "format": "float-quantized"}


REFUSED = [
    *(
        ({"quant_method": m}, f"quant_method='{m}'")
        for m in ("awq", "gptq", "bitsandbytes", "mxfp4", "fbgemm_fp8")
    ),
    ({**SCHEMES["fp8"][0], "activation_scheme": "static"}, "activation_scheme='static'"),
    ({**SCHEMES["fp8"][0], "weight_block_size": None}, "weight_block_size=None"),
    (group_with(group={"input_activations": {"num_bits": 8}}), "input_activations"),
    (group_with(type="float"), "type='float'"),
    (group_with(num_bits=3), "num_bits=3"),
    (group_with(actorder="group"), "actorder='group'"),
    (group_with(group_size=None), "group_size=None"),
    (group_with(group_size="32"), "group_size='32'"),
    (floats_with(block_structure=None), "block_structure=None"),
    (floats_with(block_structure="128x128"), "block_structure='128x128'"),
    (floats_with(block_structure=[128]), r"block_structure=\[128\]"),
    ({**SCHEMES["fp8"][0], "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
    *(
        (transformed(location), f"a transform of location='{location}' \\(R1\\)")
        for location in ("input", "output", "q_attn", "k_cache")
    ),
    ({**SCHEMES["w4a16"][0], "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
]


@pytest.mark.parametrize(
    ("section", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_not_read_is_refused_by_name(section, message, tmp_path):
    model_dir = make_checkpoint("llama", tmp_path)
    set_quantisation(model_dir, section)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(model_dir, torch.float32, CPU)
    assert "compressed-tensors pack-quantized" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_type": "Int4Tensor", "_data": {}}, "torchao' and Int4Tensor"),
        ({"_type": "Int8Tensor", "_data": {"act_quant_kwargs": {"x": 1}}}, "quantised activations"),
    ],
)
def test_torchao_tensor_that_is_not_read_is_refused_by_name(config, message, base, tmp_path):  # noqa: F811
    stored, _ = stored_pair(base("llama")[0], "torchao-int8", tmp_path)
    tensors = load_file(stored / SINGLE_NAME)
    name = "model.layers.1.mlp.down_proj.weight"
    metadata = {"tensor_names": json.dumps([name]), name: json.dumps(config)}
    save_file(tensors, stored / SINGLE_NAME, metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        load_model(stored, torch.float32, CPU)


DAMAGED = {
    "nan": ("w4a16", "_scale", lambda t: t.fill_(float("nan")), "a scale is negative or not finite"),
    "negative": ("w8a16", "_scale", lambda t: t.neg_(), "a scale is negative or not finite"),
    "shape of scales": ("w4a16", "_scale", lambda t: t[:, :0].contiguous(), "its scales are"),
    "shape of blocks": ("fp8", "_scale_inv", lambda t: t[:1].contiguous(), "its scales are"),
    "infinite": ("fp8", "_scale_inv", lambda t: t.fill_(float("inf")), "a scale is negative or not finite"),
    "exponents": ("fp8", "_scale_inv", lambda t: t.to(torch.uint8), "its scales are torch.uint8"),
    "integers": ("w4a16", "_scale", lambda t: t.to(torch.int32), "its scales are torch.int32"),
    "values": ("w4a16", "_packed", lambda t: t[:, :1].contiguous(), "not int32 for 4 bits"),
    "zero points": ("w4a16-asymmetric", "_zero_point", lambda t: t.repeat(2, 1), "its zero points are"),
    "wide zero points": ("w4a16-asymmetric", "_zero_point", lambda t: t.long(), "its zero points are"),
    "group": (
        "w4a16",
        "_shape",
        lambda t: t.sub_(torch.tensor([0, 8])),
        "no multiple of the group size|not int32",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_weight_is_named(case, base, tmp_path):  # noqa: F811
    kind, end, damage, message = DAMAGED[case]
    stored, _ = stored_pair(base("llama")[0], kind, tmp_path)
    tensors, key = load_file(stored / SINGLE_NAME), f"model.layers.1.mlp.down_proj.weight{end}"
    tensors[key] = damage(tensors[key])
    save_file(tensors, stored / SINGLE_NAME)
    with pytest.raises(
        ConfigError, match=f"layers\\.1\\.mlp\\.down_proj\\.weight.* can't be read: .*({message})"
    ):
        load_model(stored, torch.float32, CPU)


def test_missing_scales_are_named(base, tmp_path):  # noqa: F811
    stored, _ = stored_pair(base("llama")[0], "w4a16", tmp_path)
    tensors = load_file(stored / SINGLE_NAME)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, stored / SINGLE_NAME)
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj\.weight_scale'"):
        load_model(stored, torch.float32, CPU)


def test_truncated_file_is_named(base, tmp_path):  # noqa: F811
    stored, _ = stored_pair(base("llama")[0], "fp8", tmp_path)
    content = (stored / SINGLE_NAME).read_bytes()
    (stored / SINGLE_NAME).write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        load_model(stored, torch.float32, CPU)
