# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from moe_lora.adapters.peft.base import base_tensor
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import INDEX_NAME, SINGLE_NAME, read_header
from moe_lora.models import checkpoint as checkpoints
from moe_lora.models import loader
from moe_lora.models.checkpoint import Checkpoint
from moe_lora.models.loader import load_model
from tests.families import (
    ALL_FAMILIES,
    FAMILIES,
    FURTHER_MOE,
    LATER_MOE,
    make_checkpoint,
    save_random,
    tiny_config,
)
from tests.families import load_model as load_transformers
from tests.families.wrapped import wrapped_language_model
from tests.grids import with_quick

CPU = torch.device("cpu")


def load(path, dtype=torch.float32):
    return load_model(path, dtype, CPU)


def assert_same_parameters(found, expected):
    expected = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def edit(path, change):
    """Rewrite the checkpoint's tensors after `change(tensors)`."""
    tensors = {key: tensor.clone() for key, tensor in load_file(path / SINGLE_NAME).items()}
    change(tensors)
    save_file(tensors, path / SINGLE_NAME)


def read_all(path):
    checkpoint = Checkpoint(path)
    return {key: checkpoint[key] for key in checkpoint}


@pytest.fixture
def llama(tmp_path):
    return make_checkpoint("llama", tmp_path)


BY_DEFAULT = (*FAMILIES, "afmoe", "qwen3_next", "deepseek_v3", "gemma4")
"""Families with layers of other pieces."""


@pytest.mark.parametrize("family", with_quick(ALL_FAMILIES, BY_DEFAULT))
def test_sharded_checkpoint_loads_the_same_weights(family, served, tmp_path):
    single = served(family).model_dir
    load_transformers(single).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_parameters(load(tmp_path), load(single))


@pytest.mark.parametrize(
    "family", with_quick(("mixtral", "qwen3_moe", *LATER_MOE, *FURTHER_MOE), ("mixtral", *BY_DEFAULT[5:]))
)
def test_fused_experts_on_disk_load_the_same_weights(family, served, tmp_path):
    model_dir = served(family).model_dir
    load_transformers(model_dir).save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith(".experts.gate_up_proj") for key in Checkpoint(tmp_path))
    assert_same_parameters(load(tmp_path), load(model_dir))


def test_loading_imports_no_symbolic_shapes(llama, monkeypatch):
    """And with them sympy: over half a second of each process of an engine."""
    for name in ("sympy", "torch.fx.experimental.symbolic_shapes"):
        monkeypatch.setitem(sys.modules, name, None)
    load(llama)


def test_weights_are_converted_to_the_asked_dtype(llama):
    model = load(llama, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.embedding, load(llama).embedding.bfloat16())


def test_tied_head_is_the_embedding_and_its_stored_copy_is_tolerated(tmp_path):
    path = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * 1}))
    model = load(path)
    assert model.head is model.embedding


def test_tied_head_that_is_not_the_embedding_is_refused(tmp_path):
    path = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}))
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight that is not its embedding.*=true; set it to false"
    ):
        load(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    model = load(path)
    assert torch.equal(model.head, model.embedding * 2)


def test_a_tied_checkpoint_of_the_head_alone_is_read_as_transformers_reads_it(tmp_path):
    path = make_checkpoint("llama", tmp_path / "a", tie_word_embeddings=True)
    expected = load(path)
    save_model(load_transformers(path), str(path / SINGLE_NAME))
    assert "model.embed_tokens.weight" not in Checkpoint(path)
    model = load(path)
    assert model.head is model.embedding
    assert_same_parameters(model, expected)
    for site in ("head", "embedding"):
        file, entry = base_tensor(site, path, "", "")
        assert entry == read_header(file)["lm_head.weight"]


def test_a_tied_multimodal_checkpoint_of_the_head_alone_has_the_names_of_its_class(tmp_path):
    config = wrapped_language_model("qwen3_vl", tiny_config("qwen3", tie_word_embeddings=True).to_dict())
    path = save_random("qwen3", config, tmp_path / "a")
    expected = load(path)
    save_model(load_transformers(path), str(path / SINGLE_NAME))
    assert "model.language_model.embed_tokens.weight" not in Checkpoint(path)
    assert_same_parameters(load(path), expected)


@pytest.mark.parametrize("text", ["mistral", "ministral3"])
def test_a_head_that_only_the_text_config_unties_is_read_as_transformers_reads_it(text, tmp_path):
    """transformers' class writes tie_word_embeddings=true where the released config has no such key."""
    config = wrapped_language_model("mistral3", tiny_config(text).to_dict())
    released = save_random("mistral", config, tmp_path / "a")
    fields = json.loads((released / "config.json").read_text())
    del fields["tie_word_embeddings"]
    (released / "config.json").write_text(json.dumps(fields))
    expected, again = load(released), tmp_path / "again"
    model = load_transformers(released)
    model.save_pretrained(again)
    assert json.loads((again / "config.json").read_text())["tie_word_embeddings"] is True
    assert not torch.equal(expected.head, expected.embedding)
    assert_same_parameters(load(again), expected)
    assert torch.equal(load_transformers(again).lm_head.weight, expected.head)
    file, entry = base_tensor("head", again, "", "")
    assert entry == read_header(file)["language_model.lm_head.weight"]


def test_recomputed_rotary_buffers_of_old_checkpoints_are_tolerated(llama):
    edit(
        llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    load(llama)


def test_unexpected_tensors_are_named(llama):
    edit(llama, lambda tensors: tensors.update({f"model.layers.{i}.extra": torch.ones(1) for i in range(9)}))
    with pytest.raises(ConfigError, match=r"9 tensors .*: model\.layers\.0\.extra, .*\.\.\."):
        load(llama)


def test_layers_beyond_those_of_the_config_are_an_error(llama):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        load(llama)


def test_missing_tensor_is_named(llama):
    edit(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(llama)


@pytest.mark.parametrize("family", with_quick(ALL_FAMILIES, BY_DEFAULT))
def test_tensor_of_another_shape_is_named(family, tmp_path):
    path = make_checkpoint(family, tmp_path)
    key = next(
        k
        for k in sorted(load_file(path / SINGLE_NAME))
        if any(one in k for one in ("down_proj", "w2", "output_linear"))
    )
    edit(path, lambda tensors: tensors.update({key: torch.ones(3, 5)}))
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load(path)


@pytest.mark.parametrize(
    ("family", "layer", "changes"), [("glm4_moe", 3, {}), ("minimax_m2", 2, {"num_mtp_modules": 1})]
)
def test_layers_of_multi_token_prediction_are_skipped_with_a_word(family, layer, changes, tmp_path, caplog):
    path = make_checkpoint(family, tmp_path, **changes)
    before = load(path)
    extra = {
        f"model.layers.{layer}.eh_proj.weight": torch.ones(32, 64),
        f"model.layers.{layer}.enorm.weight": torch.ones(32),
    }
    edit(path, lambda tensors: tensors.update(extra))
    caplog.clear()
    with caplog.at_level("INFO"):
        assert_same_parameters(load(path), before)
    assert "2 tensors of the checkpoint are not read: multi-token prediction" in caplog.text
    edit(path, lambda tensors: tensors.update({f"model.layers.{layer + 1}.enorm.weight": torch.ones(32)}))
    with pytest.raises(ConfigError, match=rf"1 tensors .* does not use: model\.layers\.{layer + 1}\.enorm"):
        load(path)


@pytest.mark.parametrize(
    ("family", "correction"),
    [("glm4_moe", "gate.e_score_correction_bias"), ("ernie4_5_moe", "moe_statics.e_score_correction_bias")],
)
def test_gates_and_their_corrections_stay_in_fp32(family, correction, tmp_path):
    path = make_checkpoint(family, tmp_path)
    mlp, stored = load(path, torch.bfloat16).layers[1].mlp, load_file(path / SINGLE_NAME)
    for held, key in ((mlp.correction.weight, correction), (mlp.gate.weight, "gate.weight")):
        assert held.dtype == torch.float32
        assert torch.equal(held, stored[f"model.layers.1.mlp.{key}"].view(held.shape))
    assert mlp.down.weight.dtype == torch.bfloat16


def test_a_gate_with_a_correction_has_the_dtype_of_its_family(tmp_path):
    path = make_checkpoint("minimax_m2", tmp_path)
    mlp, stored = load(path, torch.bfloat16).layers[1].mlp, load_file(path / SINGLE_NAME)
    assert mlp.gate.weight.dtype == torch.bfloat16
    assert mlp.correction.weight.dtype == torch.float32
    key = "model.layers.1.block_sparse_moe.e_score_correction_bias"
    assert torch.equal(mlp.correction.weight, stored[key])


def test_damaged_file_is_an_error_that_names_it(llama):
    (llama / SINGLE_NAME).write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load(llama)


def test_a_config_that_is_no_object_is_an_error(llama):
    (llama / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json must be a JSON object, not list"):
        load(llama)


def test_directory_without_weights_is_an_error(llama):
    (llama / SINGLE_NAME).unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(llama)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ('{"metadata": {}}', "not an index"),
        ('{"weight_map": {"model.norm.weight": "gone.safetensors"}}', "does not exist"),
        ('{"weight_map": {"model.other": "model-00001-of-00001.safetensors"}}', "does not hold"),
    ],
)
def test_index_that_lies_is_an_error(llama, index, message):
    (llama / SINGLE_NAME).rename(llama / "model-00001-of-00001.safetensors")
    (llama / INDEX_NAME).write_text(index)
    with pytest.raises(ConfigError, match=message):
        read_all(llama)


@pytest.mark.parametrize("shards", ["kept", "removed"])
def test_one_file_goes_before_the_index_of_an_earlier_save(shards, llama, tmp_path):
    """As transformers reads a folder."""
    folder = tmp_path / "twice"
    load_transformers(make_checkpoint("llama", tmp_path / "former", seed=1)).save_pretrained(
        folder, max_shard_size="20KB"
    )
    if shards == "removed":
        for path in folder.glob("*.safetensors"):
            path.unlink()
    shutil.copy(llama / SINGLE_NAME, folder)
    assert (folder / INDEX_NAME).exists()
    assert_same_parameters(load(folder), load(llama))
    [path, _] = base_tensor("embedding", folder, "", "")
    assert path == folder / SINGLE_NAME


def test_tensors_are_mapped_not_read(llama):
    """Two reads of a tensor share the mapped file's memory."""
    checkpoint = Checkpoint(llama)
    first, second = (checkpoint["model.embed_tokens.weight"] for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_empty_batch_is_read(dtype, llama, monkeypatch):
    batches, read = [], checkpoints._read_all

    def noted(batch):
        batches.append(batch)
        read(batch)

    monkeypatch.setattr(checkpoints, "_read_all", noted)
    load(llama, dtype)
    assert all(batches)
    assert bool(batches) == (dtype == torch.float32)


def test_weights_lie_side_by_side(llama):
    weights = list(load(llama).parameters())
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    places = sorted((weight.data_ptr(), weight.nbytes) for weight in weights)
    for (place, nbytes), (following, _) in itertools.pairwise(places):
        assert place % 64 == 0
        assert place + nbytes <= following < place + nbytes + 64


def test_tied_weights_lie_in_one_place():
    with torch.device("meta"):
        one, tied = nn.Linear(7, 5, bias=False), nn.Linear(7, 5, bias=False)
    tied.weight = one.weight
    model = nn.ModuleList([one, tied, nn.ModuleList([one])])
    model._apply(loader._side_by_side([*model.parameters()]))
    assert one.weight.device.type == "cpu"
    assert one.weight.data_ptr() == tied.weight.data_ptr()
