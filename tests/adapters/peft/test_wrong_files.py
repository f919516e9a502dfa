# SPDX-License-Identifier: Apache-2.0
"""Adapter folders with pointers, web pages, shards and other tools' files: refused with the cause."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.file_check import check_adapter
from moe_lora.adapters.peft.files import adapter_folder
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError
from tests.core.test_wrong_files import KINDS, POINTER
from tests.families import make_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def good(checkpoint, tmp_path_factory) -> Path:
    return make_adapter("llama", checkpoint("llama"), tmp_path_factory.mktemp("good") / "a")


def refusal(folder: Path, shape) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, shape, torch.float32)
    with pytest.raises(AdapterError) as without_torch:
        check_adapter(folder, shape)
    assert str(without_torch.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_safetensors_is_named_for_what_it_is(kind, good, shape_of, tmp_path):
    folder = shutil.copytree(good, tmp_path / "a")
    content, said = KINDS[kind]
    (folder / WEIGHTS).write_bytes(content)
    message = refusal(folder, shape_of("llama"))
    assert "not a readable safetensors file" in message
    assert said in message


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"JSON", "a text"}))
def test_a_config_that_is_no_json_is_named_for_what_it_is(kind, good, shape_of, tmp_path):
    folder = shutil.copytree(good, tmp_path / "a")
    content, said = KINDS[kind]
    (folder / CONFIG).write_bytes(content)
    message = refusal(folder, shape_of("llama"))
    assert f"{CONFIG}: not valid JSON" in message
    assert said in message


@pytest.mark.parametrize(
    ("put", "named"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe or a device")], ids=["folder", "pipe"]
)
def test_weights_that_are_no_file_are_named_for_what_they_are(put, named, good, shape_of, tmp_path):
    folder = shutil.copytree(good, tmp_path / "a")
    (folder / WEIGHTS).unlink()
    put(folder / WEIGHTS)
    message = refusal(folder, shape_of("llama"))
    assert f"{WEIGHTS}: {named}, not a file" in message


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 100, -1])
def test_a_file_cut_short_is_no_other_kind(num_bytes, good, shape_of, tmp_path):
    folder = shutil.copytree(good, tmp_path / "a")
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:num_bytes])
    message = refusal(folder, shape_of("llama"))
    assert "not a readable safetensors file" in message
    assert "copy it again" in message or "download the file again" in message


def test_a_header_whose_length_begins_as_an_archive_does_is_read(good, shape_of, tmp_path):
    """0x8b1f, the first bytes of gzip, is a length too, as is 0x0280 of a pickle."""
    folder = shutil.copytree(good, tmp_path / "a")
    whole = (folder / WEIGHTS).read_bytes()
    [length] = struct.unpack("<Q", whole[:8])
    assert length < 0x8B1F
    header = whole[8 : 8 + length].ljust(0x8B1F)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 0x8B1F) + header + whole[8 + length :])
    wanted = read_adapter(good, shape_of("llama"), torch.float32)
    assert read_adapter(folder, shape_of("llama"), torch.float32).content_hash == wanted.content_hash


def shards(folder: Path, stem: str = "adapter_model", index: bool = True) -> None:
    tensors = load_file(folder / WEIGHTS)
    keys = sorted(tensors)
    names = [f"{stem}-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file({key: tensors[key] for key in keys[number::2]}, folder / name)
    if index:
        weight_map = {key: names[number % 2] for number, key in enumerate(keys)}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def shards_without_the_second(folder: Path) -> None:
    shards(folder)
    (folder / "adapter_model-00002-of-00002.safetensors").unlink()


def index_alone(folder: Path) -> None:
    shards_without_the_second(folder)
    (folder / "adapter_model-00001-of-00002.safetensors").unlink()


def renamed(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def pointer_to_a_pickle(folder: Path) -> None:
    renamed("adapter_model.bin")(folder)
    (folder / "adapter_model.bin").write_bytes(POINTER)


def trainers_state(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json"):
        (folder / name).write_bytes(b"x")


def deepspeed(folder: Path) -> None:
    trainers_state(folder)
    (folder / "global_step20").mkdir()
    (folder / "zero_to_fp32.py").write_text("pass")


def broken_link(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.symlink("../.git/annex/objects/none", folder / WEIGHTS)


def with_checkpoints(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    for number in (100, 200):
        (folder / f"checkpoint-{number}").mkdir()
        (folder / f"checkpoint-{number}" / CONFIG).write_text("{}")


def esft(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / "expert_cfg.json").write_text(json.dumps({"experts": {"1": [3]}}))


def esft_with_a_config(folder: Path) -> None:
    expert = "base_model.model.model.layers.0.mlp.experts.3.gate_proj.weight"
    save_file({expert: torch.ones(24, 32)}, folder / WEIGHTS)


FOLDERS = {
    "ESFT": (
        esft,
        ("expert_cfg.json is of ESFT", "full weights of experts", "train a LoRA on these experts"),
    ),
    "ESFT's weights": (esft_with_a_config, ("experts.3.gate_proj.weight: full weights of experts", "a LoRA")),
    "shards": (shards, ("shards", "adapter_model-00001-of-00002", "adapter_model-00002-of-00002")),
    "shards without an index": (lambda folder: shards(folder, index=False), ("shards", "00001-of-00002")),
    "shards of a model": (lambda folder: shards(folder, "model"), ("shards", "model-00001-of-00002")),
    "shards, one missing": (shards_without_the_second, ("without adapter_model-00002-of-00002", "download")),
    "an index alone": (index_alone, ("shards", "00001-of-00002", "00002-of-00002", "download")),
    "a pickle": (renamed("adapter_model.bin"), ("adapter_model.bin", "pickle")),
    "a pointer to a pickle": (
        pointer_to_a_pickle,
        ("adapter_model.bin is a Git LFS pointer", "git lfs pull", "convert it to safetensors"),
    ),
    "pickled shards": (renamed("adapter_model-00001-of-00002.bin"), ("00001-of-00002.bin", "pickle")),
    "a GGUF": (renamed("adapter_model.gguf"), ("adapter_model.gguf",)),
    "another name": (renamed("adapters.safetensors"), ("adapters.safetensors",)),
    "a trainer's state": (trainers_state, ("only the state of a trainer", "optimizer.pt")),
    "DeepSpeed's state": (deepspeed, ("global_step20", "zero_to_fp32.py")),
    "a broken link": (broken_link, ("a link to a file that is not there",)),
    "checkpoints": (with_checkpoints, ("checkpoint-100", "checkpoint-200")),
    "nothing": (lambda folder: (folder / WEIGHTS).unlink(), ("missing", "safe_serialization")),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_weights_in_another_form_are_named(case, good, shape_of, tmp_path):
    folder = shutil.copytree(good, tmp_path / "a")
    damage, said = FOLDERS[case]
    damage(folder)
    message = refusal(folder, shape_of("llama"))
    for words in said:
        assert words in message


def test_other_files_beside_the_weights_are_no_hindrance(good, shape_of, tmp_path):
    folder = shutil.copytree(good, tmp_path / "a")
    weights = (folder / WEIGHTS).read_bytes()
    shards(folder)
    trainers_state_names = ("optimizer.pt", "adapter_model.bin", "adapter.gguf")
    for name in trainers_state_names:
        (folder / name).write_bytes(b"x")
    (folder / WEIGHTS).write_bytes(weights)
    wanted = read_adapter(good, shape_of("llama"), torch.float32)
    assert read_adapter(folder, shape_of("llama"), torch.float32).content_hash == wanted.content_hash


def test_the_top_of_a_cache_names_the_folder_to_give(good, tmp_path):
    shutil.copytree(good, tmp_path / "models--org--a" / "snapshots" / "abc")
    with pytest.raises(AdapterError, match="snapshots/abc"):
        adapter_folder(str(tmp_path / "models--org--a"), "a")


def test_a_folder_below_whose_name_is_no_utf_8_is_named(good, tmp_path):
    shutil.copytree(good, tmp_path / "saved" / os.fsdecode(b"metr\xe9"))
    with pytest.raises(AdapterError, match=r"folder metr\\udce9 is no UTF-8; rename"):
        adapter_folder(str(tmp_path / "saved"), "a")


def test_a_base_config_that_is_a_pointer_is_named(good, shape_of, tmp_path):
    folder, base = shutil.copytree(good, tmp_path / "a"), tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes(POINTER)
    fields = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(fields | {"base_model_name_or_path": str(base)}))
    message = refusal(folder, shape_of("llama"))
    assert "Git LFS pointer" in message
    assert "git lfs pull" in message
