# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_lora.adapters.registry.base_model import base_model_hash
from moe_lora.core.errors import ConfigError
from tests.adapters.peft_folders import alter


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    save_file({"a": np.ones((40, 4), np.float32)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_name_version_and_free_text_do_not_count(model):
    before = base_model_hash(model)
    config = {"hidden_size": 4, "transformers_version": "9", "_name_or_path": "x", "model_type": "llama"}
    (model / "config.json").write_text(json.dumps(config, indent=4))
    save_file({"a": np.ones((40, 4), np.float32)}, model / "model.safetensors", metadata={"format": "np"})
    (model / "README.md").write_text("other files neither")
    assert base_model_hash(model) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text('{"model_type": "llama", "hidden_size": 5}'),
        lambda model: alter(model / "model.safetensors"),
        lambda model: save_file({"b": np.ones((40, 4), np.float32)}, model / "model.safetensors"),
        lambda model: save_file({"a": np.ones((40, 4), np.float16)}, model / "model.safetensors"),
        lambda model: save_file({"c": np.ones(4, np.float32)}, model / "more.safetensors"),
        lambda model: (model / "model.safetensors").rename(model / "other.safetensors"),
    ],
)
def test_config_tensors_and_data_count(model, change):
    before = base_model_hash(model)
    change(model)
    assert base_model_hash(model) != before


def test_a_further_trained_model_of_the_same_sizes_is_another_one(model):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((1000, 1000)).astype(np.float32)
    hashes = []
    for factor in (1.0, 1.001):
        save_file({"a": weights * factor}, model / "model.safetensors")
        hashes.append(base_model_hash(model))
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: (model / "config.json").unlink(), "config.json can't be read"),
        (lambda model: (model / "config.json").write_text("[]"), "JSON object"),
        (lambda model: (model / "config.json").write_text("{"), "not valid JSON"),
        (lambda model: (model / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "not a safetensors file"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 100), "not a safetensors file"),
        (
            lambda model: (model / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{"),
            "header can't be read",
        ),
    ],
)
def test_what_is_no_model_is_named(model, change, named):
    change(model)
    with pytest.raises(ConfigError, match=named):
        base_model_hash(model)
