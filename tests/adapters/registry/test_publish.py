# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.adapters.registry import register
from moe_lora.api import Registry, register_adapter
from moe_lora.core.errors import AdapterError
from tests.families import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory) -> Path:
    return make_adapter("mixtral", checkpoint("mixtral"), tmp_path_factory.mktemp("trained") / "x")


@pytest.fixture
def registry(tmp_path):
    with Registry(tmp_path / "registry", create=True) as opened:
        yield opened


def test_tensors_of_a_training_loop_are_stored_as_an_adapter_that_computes_the_same(
    registry, trained, checkpoint, shape_of
):
    tensors, config = load_file(trained / WEIGHTS_FILE), json.loads((trained / CONFIG_FILE).read_text())
    model = checkpoint("mixtral")
    added = register_adapter(registry, "x", tensors, config, model_dir=model, owner="loop")
    assert (added.version, added.owner) == (1, "loop")
    shape = shape_of("mixtral")
    stored = read_adapter(added.path, shape, torch.float32)
    assert stored.content_hash == read_adapter(trained, shape, torch.float32).content_hash
    assert register_adapter(registry, "x", tensors, config, model_dir=model).version == 1
    tensors[next(iter(tensors))] += 1
    assert register_adapter(registry, "x", tensors, config, model_dir=model).version == 2


def test_an_adapter_of_other_sizes_is_refused(registry, trained, checkpoint):
    with pytest.raises(AdapterError, match=str(trained)):
        register_adapter(registry, "x", trained, model_dir=checkpoint("dbrx"))
    assert registry.adapters() == []


@pytest.mark.parametrize("kind", [SafetensorError, OSError])
def test_a_full_folder_for_temporary_files_is_named(registry, trained, checkpoint, monkeypatch, kind):
    def full(*_: object) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr(register, "save_file", full)
    tensors, config = load_file(trained / WEIGHTS_FILE), json.loads((trained / CONFIG_FILE).read_text())
    with pytest.raises(AdapterError, match=r"/moe_lora-\w+ can't be written: No space .*make room in TMPDIR"):
        register_adapter(registry, "x", tensors, config, model_dir=checkpoint("mixtral"))
    assert registry.adapters() == []


@pytest.mark.parametrize(
    ("source", "config", "options", "error"),
    [
        ({}, None, {}, "config is missing"),
        ({}, {}, {"link": True}, "link"),
        ({"a": 5}, {}, {}, "a: expected a tensor, found int"),
        ({"a": torch.empty(2, device="meta")}, {}, {}, "a: a tensor on the device meta, without values"),
        ({"a": torch.eye(2).to_sparse()}, {}, {}, "a: a tensor of layout torch.sparse_coo"),
        ({}, {"r": 1j}, {}, "can't be saved"),
        ({}, {"r": 1}, {}, "peft_type"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused(registry, checkpoint, source, config, options, error):
    with pytest.raises(ValueError, match=error):
        register_adapter(registry, "x", source, config, model_dir=checkpoint("mixtral"), **options)
    assert registry.adapters() == []
