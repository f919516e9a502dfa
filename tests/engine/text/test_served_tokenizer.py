# SPDX-License-Identifier: Apache-2.0
"""The tokenizer at a server's start: wrong files are named, and another size than the model's is told."""

from __future__ import annotations

import json
import logging

import pytest

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.engine.text.text import served_tokenizer
from tests.core.test_wrong_files import KINDS, POINTER
from tests.small_tokenizers import TEMPLATE, characters, write_dir

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "tokenizer.model", "additional_chat_templates/tool_use.jinja"),
)


def served(folder):
    return served_tokenizer(EngineConfig(model_dir=str(folder)))


@pytest.fixture
def folder(tmp_path):
    found = write_dir(tmp_path, characters(), chat_template=TEMPLATE)
    (found / "config.json").write_text(json.dumps({"vocab_size": served(found).vocab_size}))
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_in_the_place_of_a_file_is_named(name, folder):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ConfigError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        served(folder)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"JSON", "a text"}))
def test_a_tokenizer_that_holds_something_else_is_named(kind, folder):
    content, said = KINDS[kind]
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is ") as caught:
        served(folder)
    assert said in str(caught.value)


def test_a_text_that_is_no_tokenizer_is_named_as_before(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        served(folder)


@pytest.mark.parametrize(
    ("difference", "level", "said"),
    [
        (0, None, ""),
        (5, logging.INFO, "have no text"),
        (-5, logging.WARNING, "more than the model's vocabulary"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_tokenizer_of_another_size_is_told_once(is_wrapped, difference, level, said, folder, caplog):
    caplog.set_level(logging.INFO, logger="moe_lora")
    num_tokens = json.loads((folder / "config.json").read_text())["vocab_size"]
    text = {"vocab_size": num_tokens + difference}
    (folder / "config.json").write_text(json.dumps({"text_config": text} if is_wrapped else text))
    served(folder)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert said in caplog.text
    assert not difference or str(num_tokens) in caplog.text
