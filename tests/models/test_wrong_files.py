# SPDX-License-Identifier: Apache-2.0
"""Base folders with pointers, web pages, missing shards and other formats: refused with the cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.adapters.registry.base_model import base_model_hash, model_shape
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import INDEX_NAME, SINGLE_NAME, read_config
from moe_lora.models.loader import load_model
from tests.core.test_wrong_files import KINDS, POINTER
from tests.families import make_checkpoint

NAMES = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("good") / "base")


@pytest.fixture
def base(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "base"))


def refusal(base: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(base, torch.float32, torch.device("cpu"))
    return str(caught.value)


def divide(base: Path, index: bool = True) -> None:
    tensors = load_file(base / SINGLE_NAME)
    keys = sorted(tensors)
    for number, name in enumerate(NAMES):
        save_file({key: tensors[key] for key in keys[number::3]}, base / name)
    if index:
        weight_map = {key: NAMES[number % 3] for number, key in enumerate(keys)}
        (base / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (base / SINGLE_NAME).unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_no_safetensors_are_named_for_what_they_are(kind, base):
    content, said = KINDS[kind]
    (base / SINGLE_NAME).write_bytes(content)
    message = refusal(base)
    assert said in message
    assert SINGLE_NAME in message
    with pytest.raises(ConfigError, match="not a safetensors file") as caught:
        base_model_hash(base)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"JSON", "a text"}))
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_json_files_that_hold_something_else_are_named(kind, name, base):
    content, said = KINDS[kind]
    (base / SINGLE_NAME).unlink()
    (base / name).write_bytes(content)
    message = refusal(base)
    assert said in message
    assert name in message


def test_a_pointer_as_config_is_named_wherever_it_is_read(base):
    (base / "config.json").write_bytes(POINTER)
    for read in (read_config, model_shape, base_model_hash):
        with pytest.raises(ConfigError, match=r"Git LFS pointer.*git lfs pull"):
            read(base)


@pytest.mark.parametrize("index", [True, False])
def test_missing_shards_are_named_all_at_once(index, base):
    divide(base, index)
    for name in NAMES[1:]:
        (base / name).unlink()
    message = refusal(base)
    assert f"{NAMES[1]}, {NAMES[2]}" in message
    assert NAMES[0] not in message
    assert "download the missing shards" in message


def test_one_shard_that_is_a_pointer_is_named(base):
    divide(base)
    (base / NAMES[1]).write_bytes(POINTER)
    message = refusal(base)
    assert NAMES[1] in message
    assert "Git LFS pointer" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model-Q4.gguf"])
def test_other_formats_are_named(name, base):
    (base / SINGLE_NAME).rename(base / name)
    message = refusal(base)
    assert "no *.safetensors" in message
    assert name in message


def test_a_pointer_to_a_pickle_is_named_as_a_pointer(base):
    (base / SINGLE_NAME).unlink()
    (base / "pytorch_model.bin").write_bytes(POINTER)
    message = refusal(base)
    assert "pytorch_model.bin is a Git LFS pointer" in message
    assert "git lfs pull" in message


FOLDERS = {
    "an adapter": (["adapter_config.json"], "--lora-modules"),
    "a cache": (["snapshots/abc/config.json"], "snapshots/abc"),
    "GGUF": (["model.gguf"], "model.gguf"),
    "a trainer's output": (["checkpoint-7/config.json", "trainer_state.json"], "checkpoint-7"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_without_config_are_told(case, tmp_path):
    names, said = FOLDERS[case]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json does not exist") as caught:
        read_config(tmp_path)
    assert said in str(caught.value)
