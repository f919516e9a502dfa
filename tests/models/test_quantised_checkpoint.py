# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written quantised: they hold what quantising at load makes, and none is half there."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.core.errors import ConfigError
from moe_lora.core.progress import silent
from moe_lora.core.wrong_files import INDEX_NAME, SINGLE_NAME
from moe_lora.models import quantised_checkpoint
from moe_lora.models.loader import load_model
from moe_lora.models.quantised_checkpoint import quantise_checkpoint
from moe_lora.models.quantised_weight import QuantisedWeight, quantisation_of
from tests.families import FAMILIES, make_checkpoint, shard_of
from tests.stored_checkpoints import fused, stored_pair

from .test_quantised import CPU, FP8, INT4, INT8, base  # noqa: F401  (the fixture)

INT8_HEAD = quantisation_of("int8", None, True)
FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8, "int8-head": INT8_HEAD}


def assert_same_model(found, expected):
    """Values and scales, bit for bit."""
    assert any(isinstance(module, QuantisedWeight) for module in found.modules())
    kept, wanted = found.state_dict(), expected.state_dict()
    assert kept.keys() == wanted.keys()
    for name, tensor in kept.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), name


QUICK = (("mixtral", "int4"), ("qwen3_moe", "int8"), ("gpt_oss", "int8-head"), ("llama", "fp8"))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
        for cell in product(FAMILIES, FORMATS)
    ],
)
def test_holds_what_quantising_at_load_makes(family, kind, base, tmp_path):  # noqa: F811
    model_dir, dtype = base(family)[0], torch.bfloat16 if family == "mixtral" else torch.float32
    quantise_checkpoint(model_dir, tmp_path / "out", FORMATS[kind], dtype, silent)
    found = load_model(tmp_path / "out", dtype, CPU)
    assert_same_model(found, load_model(model_dir, dtype, CPU, quantisation=FORMATS[kind]))
    if family != "llama" and kind == "int8":
        shard = shard_of(model_dir, expert_parallel=2, dist_rank=1)
        part = load_model(tmp_path / "out", dtype, CPU, shard).layers[0].mlp.down.weight
        assert torch.equal(part.data, found.layers[0].mlp.down.weight.data[2:])


def test_fp8_in_blocks_and_a_tied_head(tmp_path):
    """Matrices of whole blocks, where each begins with one in the file and in memory alike."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "head_dim": 128}
    model_dir = make_checkpoint(
        "llama", tmp_path / "base", num_key_value_heads=1, tie_word_embeddings=True, **sizes
    )
    quantisation = quantisation_of("fp8", 128, True)
    quantise_checkpoint(model_dir, tmp_path / "out", quantisation, torch.bfloat16, silent)
    found = load_model(tmp_path / "out", torch.bfloat16, CPU)
    assert found.head.form.row_group > 1
    kept = found.state_dict()
    for name, tensor in (
        load_model(model_dir, torch.bfloat16, CPU, quantisation=quantisation).state_dict().items()
    ):
        assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8)), name


def test_a_tied_head_of_a_multimodal_checkpoint(tmp_path):
    model_dir = make_checkpoint("gemma4", tmp_path / "base")
    config = json.loads((model_dir / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (model_dir / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": config}))
    quantise_checkpoint(model_dir, tmp_path / "out", INT8_HEAD, torch.bfloat16, silent)
    text = json.loads((tmp_path / "out/config.json").read_text())["text_config"]
    assert (text["tie_word_embeddings"], text["dtype"]) == (False, "bfloat16")
    found = load_model(tmp_path / "out", torch.bfloat16, CPU)
    assert isinstance(found.head, QuantisedWeight)
    assert_same_model(found, load_model(model_dir, torch.bfloat16, CPU, quantisation=INT8_HEAD))


def test_experts_of_one_tensor_become_layers_in_several_files(base, tmp_path, monkeypatch):  # noqa: F811
    model_dir = shutil.copytree(base("mixtral")[0], tmp_path / "fused")
    save_file(fused(load_file(model_dir / SINGLE_NAME)), model_dir / SINGLE_NAME)
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    others = {"pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.onnx"}
    for name in others:
        (model_dir / name).write_text("not this one")
    monkeypatch.setattr(quantised_checkpoint, "SHARD_BYTES", 20_000)
    shown = []
    quantise_checkpoint(
        model_dir,
        tmp_path / "out",
        INT4,
        torch.float32,
        lambda said, done, total: shown.append((done, total)),
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", INDEX_NAME, "generation_config.json", "chat_template.jinja"} <= names
    assert {*others, SINGLE_NAME}.isdisjoint(names)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("model-*-of-*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 30_000
    assert shown[-1][0] == shown[-1][1] > shown[0][0]
    found = load_model(tmp_path / "out", torch.float32, CPU)
    assert_same_model(found, load_model(base("mixtral")[0], torch.float32, CPU, quantisation=INT4))


@pytest.mark.parametrize(("setting", "value"), [("intermediate_size", 16), ("num_local_experts", 3)])
def test_experts_of_one_tensor_have_the_shape_of_config_json(setting, value, base, tmp_path):  # noqa: F811
    """A smaller one would be cut out of it."""
    model_dir = shutil.copytree(base("mixtral")[0], tmp_path / "base")
    tensors = fused(load_file(model_dir / SINGLE_NAME))
    config = json.loads((model_dir / "config.json").read_text())
    assert config[setting] > value
    if setting == "num_local_experts":
        gates = {key: tensor[:value] for key, tensor in tensors.items() if key.endswith("gate.weight")}
        tensors |= {key: gate.contiguous() for key, gate in gates.items()}
    save_file(tensors, model_dir / SINGLE_NAME)
    (model_dir / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj in .* where config\.json asks for \("):
        quantise_checkpoint(model_dir, tmp_path / "out", INT8, torch.float32, silent)
    assert nothing_left(tmp_path)


def nothing_left(folder: Path) -> bool:
    return [path.name for path in folder.iterdir() if path.name not in ("base", "stored", "plain")] == []


def test_what_comes_quantised_and_what_is_there_are_refused(base, tmp_path):  # noqa: F811
    stored, plain = stored_pair(base("llama")[0], "w4a16", tmp_path)
    with pytest.raises(ConfigError, match=r"is quantised already \('compressed-tensors'\): .* rounded twice"):
        quantise_checkpoint(stored, tmp_path / "out", INT8, torch.float32, silent)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": config}))
    with pytest.raises(ConfigError, match=r"is quantised already \('compressed-tensors'\)"):
        quantise_checkpoint(stored, tmp_path / "out", INT8, torch.float32, silent)
    with pytest.raises(ConfigError, match="is there already; give a new folder"):
        quantise_checkpoint(plain, stored, INT8, torch.float32, silent)
    with pytest.raises(ConfigError, match="absent is not a folder; make it first"):
        quantise_checkpoint(plain, tmp_path / "absent" / "out", INT8, torch.float32, silent)
    assert nothing_left(tmp_path)


def test_weight_that_can_not_be_held_is_named_before_anything_is_written(served, tmp_path):
    model_dir = served("dbrx").model_dir
    with pytest.raises(
        ConfigError, match=r"int4 can't hold .*experts\.mlp\.0\.w2\.weight of shape \(32, 24\): its 24 inputs"
    ):
        quantise_checkpoint(model_dir, tmp_path / "out", INT4, torch.float32, silent)
    assert nothing_left(tmp_path)


def test_disk_without_room_is_said_before_and_on_the_way(base, tmp_path, monkeypatch):  # noqa: F811
    model_dir = base("llama")[0]

    def full(*given, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(quantised_checkpoint, "save_file", full)
        with pytest.raises(ConfigError, match=r"out can't be written: .*No space left .* nothing is left of"):
            quantise_checkpoint(model_dir, tmp_path / "out", INT8, torch.float32, silent)
    assert nothing_left(tmp_path)
    patch_usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: patch_usage)
    with pytest.raises(ConfigError, match=r"takes .* GB, and 1e-06 GB are free on its disk"):
        quantise_checkpoint(model_dir, tmp_path / "out", INT8, torch.float32, silent)
    assert nothing_left(tmp_path)


def test_folder_of_a_killed_run_is_named(base, tmp_path):  # noqa: F811
    (tmp_path / ".out.partial").mkdir()
    with pytest.raises(
        ConfigError, match=r"\.out\.partial is of a run that goes on or was killed; .* remove it"
    ):
        quantise_checkpoint(base("llama")[0], tmp_path / "out", INT8, torch.float32, silent)
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_interrupted_it_leaves_nothing(base, tmp_path):  # noqa: F811
    def interrupt(said, done, total):
        assert not (tmp_path / "out").exists()
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(base("llama")[0], tmp_path / "out", INT8, torch.float32, interrupt)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.index_put_((torch.tensor(3), torch.tensor(3)), torch.tensor(torch.inf)), "not finite"),
        (lambda t: t[:, :5].contiguous(), r"gives \(32, 5\) where config.json asks for \(32, 32\)"),
    ],
)
def test_bad_weight_is_named(change, message, base, tmp_path):  # noqa: F811
    model_dir = shutil.copytree(base("llama")[0], tmp_path / "base")
    tensors, key = load_file(model_dir / SINGLE_NAME), "model.layers.1.mlp.up_proj.weight"
    tensors[key] = change(tensors[key])
    save_file(tensors, model_dir / SINGLE_NAME)
    with pytest.raises(ConfigError, match=rf"layers\.1\.mlp\.up_proj\.weight in .*{message}"):
        quantise_checkpoint(model_dir, tmp_path / "out", INT8, torch.float32, silent)
    assert nothing_left(tmp_path)


def test_config_names_the_dtype_and_what_stays(base, tmp_path):  # noqa: F811
    quantise_checkpoint(base("gpt_oss")[0], tmp_path / "out", INT4, torch.bfloat16, silent)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    section = config["quantization_config"]
    assert section["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert {"lm_head", "model.layers.1.mlp.router"} <= set(section["ignore"])
