# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models

from moe_lora.core.errors import ConfigError
from moe_lora.engine.text import adapter_text
from moe_lora.engine.text.adapter_text import read_adapter_text, text_remark, with_adapter_text
from moe_lora.engine.text.text import load_tokenizer
from tests.core.test_wrong_files import POINTER
from tests.small_tokenizers import byte_fallback, byte_level, characters, write_dir

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def base(tmp_path):
    return write_dir(tmp_path / "base", characters(), chat_template="BASE")


def adapter(tmp_path, base, *, more=(), **config):
    """A folder with the base's tokenizer files, as trainers write them, with `more` tokens."""
    backend = characters()
    backend.add_special_tokens(list(more))
    return write_dir(tmp_path / "adapter", backend, **{"chat_template": "BASE", **config})


def remarks(folder, base):
    return [text_remark(folder, base, used=used) for used in (False, True)]


def test_a_folder_without_text_files_or_with_the_base_s_has_no_remark(tmp_path, base):
    (tmp_path / "plain").mkdir()
    assert read_adapter_text(tmp_path / "plain", base) is None
    assert remarks(tmp_path / "plain", base) == remarks(adapter(tmp_path, base), base) == [None, None]


def test_a_template_and_an_end_token_are_used_with_the_option(tmp_path, base):
    folder = adapter(tmp_path, base, chat_template="OWN {{ eos_token }}", eos_token="<pad>")
    off, on = remarks(folder, base)
    found = "its folder has a chat template and eos_token '<pad>' (the base model's is '</s>')"
    assert off == f"{found}: ignored without --adapter-chat-template, and the base model's files are used"
    assert on == f"{found}: used (--adapter-chat-template)"
    tokenizer = load_tokenizer(base)
    own = with_adapter_text(tokenizer, str(folder), 1, None)
    assert own.render_chat(USER) == "OWN <pad>"
    assert own.eos_token_ids == (0,)
    assert own.encode("hello") == tokenizer.encode("hello")
    assert tokenizer.render_chat(USER) == "BASE"


def test_only_an_end_token_keeps_the_base_s_template(tmp_path, base):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<pad>"}))
    own = with_adapter_text(load_tokenizer(base), str(folder), 1, None)
    assert (own.render_chat(USER), own.eos_token_ids) == ("BASE", (0,))


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "chat_template.json", "additional_chat_templates/default.jinja"]
)
def test_a_template_alone_is_found_in_each_file(tmp_path, base, file):
    path = tmp_path / "adapter" / file
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"chat_template": "OWN"}) if file.endswith("json") else "OWN")
    folder = str(tmp_path / "adapter")
    assert with_adapter_text(load_tokenizer(base), folder, 1, None).render_chat(USER) == "OWN"


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_in_the_place_of_a_file_is_named_and_is_no_template(tmp_path, base, file):
    folder = adapter(tmp_path, base, chat_template="OWN")
    (folder / file).write_bytes(POINTER)
    assert f"{file} is a Git LFS pointer" in text_remark(folder, base, used=True)
    with pytest.raises(ConfigError, match="is a Git LFS pointer"):
        with_adapter_text(load_tokenizer(base), str(folder), 1, None)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": "x"}),
        ("tokenizer_config.json", {"chat_template": [{"name": 5, "template": "x"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1" * 5000: {"content": "a"}}}),
        ("added_tokens.json", {"<a>": "b", "<c>": 3}),
        ("added_tokens.json", []),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path, base, file, content):
    folder = adapter(tmp_path, base)
    (folder / file).write_text(json.dumps(content))
    assert f"its text files can't be read: {folder / file}" in text_remark(folder, base, used=True)


def test_a_file_of_deep_lists_is_named(tmp_path, base):
    folder = adapter(tmp_path, base)
    (folder / "tokenizer_config.json").write_text("[" * 200_000)
    assert "tokenizer_config.json is not JSON" in text_remark(folder, base, used=True)


def test_more_tokens_are_named_and_nothing_of_the_folder_is_used(tmp_path, base):
    more = ("<think>", "</think>")
    folder = adapter(tmp_path, base, more=more, chat_template="OWN", eos_token="</think>")
    off, on = remarks(folder, base)
    assert off == on
    assert "another tokenizer (2 more tokens ('<think>', '</think>')) and a chat template" in on
    assert "all is ignored" in on
    tokenizer = load_tokenizer(base)
    assert with_adapter_text(tokenizer, str(folder), 1, None) is tokenizer


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"added_tokens.json": {"<new>": 99}}, "1 more token ('<new>')"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"99": {"content": "<new>"}}}}, "('<new>')"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"0": {"content": "<s>"}}}}, "other ids"),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, "1 more token ('<|im_end|>')"),
        ({"vocab.json": {"a": 1}}, "another vocab.json"),
    ],
)
def test_another_vocabulary_is_seen_without_a_tokenizer_file(tmp_path, base, files, named):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert named in text_remark(folder, base, used=True)


def test_a_tokenizer_beside_a_base_without_one_is_another(tmp_path, base):
    folder = adapter(tmp_path, base)
    (base / "tokenizer.json").unlink()
    assert "a file that the base model has not" in text_remark(folder, base, used=True)


def test_a_new_version_is_read_anew(tmp_path, base):
    folder = adapter(tmp_path, base, chat_template="ONE")
    tokenizer = load_tokenizer(base)
    assert with_adapter_text(tokenizer, str(folder), 1, None).render_chat(USER) == "ONE"
    (folder / "chat_template.jinja").write_text("TWO")
    assert with_adapter_text(tokenizer, str(folder), 1, None).render_chat(USER) == "ONE"
    assert with_adapter_text(tokenizer, str(folder), 2, None).render_chat(USER) == "TWO"
    assert with_adapter_text(tokenizer, str(folder), 1, None, "second").render_chat(USER) == "TWO"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "chat_template.json"])
def test_a_file_that_is_no_json_is_named(tmp_path, base, name):
    folder = adapter(tmp_path, base)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / name).write_text("{")
    assert text_remark(folder, base, used=True).startswith("its text files can't be read")
    with pytest.raises(ConfigError, match=name):
        with_adapter_text(load_tokenizer(base), str(folder), 1, None)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/x.jinja"])
def test_a_link_out_of_the_adapter_root_is_refused(tmp_path, base, name):
    (tmp_path / "secret").write_text("SECRET")
    link = tmp_path / "root" / "adapter" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="is not in the server's adapter_root"):
        read_adapter_text(tmp_path / "root" / "adapter", base, str(tmp_path / "root"))


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.5), ("b", -2.0)], 0, False))


@pytest.mark.parametrize("made", [byte_level, byte_fallback, characters, unigram])
def test_tokens_are_read_from_the_file_as_tokenizers_has_them(tmp_path, made):
    backend = made()
    backend.add_tokens(["<more>", "a"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert adapter_text._read_tokens(tmp_path / "tokenizer.json") == backend.get_vocab()
