# SPDX-License-Identifier: Apache-2.0
"""A chat template and variables of all chats from the settings, not from the model's folder."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from moe_lora.config.cluster import cluster_of
from moe_lora.core.errors import ConfigError
from moe_lora.engine.text.text import load_tokenizer
from moe_lora.engine.text.tokenizer_files import ChatSettings
from tests.small_tokenizers import TEMPLATE, characters, write_dir

CHAT = [{"role": "user", "content": "hi"}]
OWN = "own {{ messages[0].content }} {{ mood }}"


@pytest.fixture
def folder(tmp_path):
    return write_dir(tmp_path / "model", characters(), chat_template=TEMPLATE)


@pytest.mark.parametrize("from_file", [True, False])
def test_a_template_of_the_settings_replaces_the_folder_s(folder, tmp_path, from_file):
    (tmp_path / "own.jinja").write_text(OWN)
    chat = ChatSettings(str(tmp_path / "own.jinja") if from_file else OWN, '{"mood": "calm"}')
    tokenizer = load_tokenizer(folder, chat)
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert one.render_chat(CHAT) == "own hi calm"
        assert one.render_chat(CHAT, variables={"mood": "glad"}) == "own hi glad"
        assert one.with_chat({}, {}).render_chat(CHAT) == "own hi calm"
        assert one.with_chat({}, {"default": "{{ mood }}"}).render_chat(CHAT) == "calm"
    assert load_tokenizer(folder).render_chat(CHAT) != "own hi calm"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (ChatSettings("no/such.jinja"), "neither a file nor Jinja text"),
        (ChatSettings(None, "[1]"), "must be a JSON object"),
        (ChatSettings(None, "{"), "must be a JSON object"),
        (ChatSettings(None, '{"messages": []}'), "without add_generation_prompt"),
    ],
)
def test_what_gives_no_template_or_variables_is_named(folder, chat, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(folder, chat)


@pytest.mark.parametrize("given", ["own.jinja", OWN])
def test_a_path_starts_at_the_folder_of_the_settings_and_jinja_stays(given):
    settings = {"chat_template": given, "chat_template_kwargs": '{"a": 1}'}
    engine = cluster_of({"model_dir": "model", "engine": settings}, Path("/there")).engine
    assert engine.chat_template == (given if given == OWN else "/there/own.jinja")
    assert engine.chat_template_kwargs == '{"a": 1}'
