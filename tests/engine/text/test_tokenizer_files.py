# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from moe_lora.core.errors import ConfigError
from moe_lora.engine.text.text import load_tokenizer
from tests.small_tokenizers import characters

USER = [{"role": "user", "content": "hello"}]
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "think_token", "sep_token")
SHOW = "".join(f"{name}={{{{ {name} }}}} " for name in NAMES) + "{{ messages[0].content }}"
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<pad>"}


def added(text):
    return {
        "__type": "AddedToken",
        "content": text,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


MAP = "special_tokens_map.json"
FILE, MORE, PROCESSOR = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
LAYOUTS = {
    "texts": ({"bos_token": "<s>", "eos_token": "</s>"}, {}),
    "objects": ({"bos_token": added("<s>"), "eos_token": added("</s>")}, {}),
    "none": ({}, {}),
    "null": ({"bos_token": None, "eos_token": "</s>"}, {}),
    "only in the map": ({}, {MAP: {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}}),
    "the map goes before the config": ({"bos_token": "</s>"}, {MAP: {"bos_token": "<s>"}}),
    "null in the map": ({"bos_token": "<s>"}, {MAP: {"bos_token": None}}),
    "no map beside added tokens": (
        {"added_tokens_decoder": {"1": {"content": "<s>", "special": True}}, "bos_token": "<s>"},
        {MAP: {"bos_token": "</s>", "eos_token": "</s>"}},
    ),
    "tokens of the model": ({"image_token": "<img>", "think_token": added("<t>")}, {}),
    "extra tokens by name": ({"extra_special_tokens": {"image_token": "<img>"}}, {}),
    "extra tokens by name in the map": ({}, {MAP: {"extra_special_tokens": {"image_token": "<img>"}}}),
    "tokens of the model by name": ({"model_specific_special_tokens": {"image_token": "<img>"}}, {}),
    "both by name": (
        {
            "model_specific_special_tokens": {"image_token": "<a>", "think_token": "<t>"},
            "extra_special_tokens": {"image_token": "<b>"},
        },
        {},
    ),
    "a default of a class": ({**LLAMA, "eos_token": "</e>"}, {}),
    "null beside a default of a class": ({**LLAMA, "bos_token": None}, {}),
    "a class that does not exist": ({"tokenizer_class": "NoSuchTokenizer"}, {}),
    "extra tokens in a list": ({"extra_special_tokens": ["<img>"]}, {}),
    "flags are no tokens": ({"add_bos_token": True, "bos_token": "<s>"}, {}),
}


def write(folder, config, files):
    folder.mkdir(exist_ok=True)
    characters().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CLASS, **config}))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_special_tokens_are_those_of_transformers(tmp_path, name):
    config, files = LAYOUTS[name]
    folder = write(tmp_path, {"chat_template": SHOW, **config}, files)
    oracle = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens == oracle.special_tokens_map
    assert tokenizer.render_chat(USER) == oracle.apply_chat_template(USER, tokenize=False)


LISTED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
TEMPLATES = {
    "in the config": ({"chat_template": "C"}, {}),
    "a file goes before the config": ({"chat_template": "C"}, {FILE: "F"}),
    "a list": ({"chat_template": LISTED}, {}),
    "an object": ({"chat_template": {"default": "D", "tool_use": "T"}}, {}),
    "a list without a default": ({"chat_template": LISTED[1:]}, {}),
    "more files": ({}, {FILE: "F", f"{MORE}/tool_use.jinja": "T"}),
    "more files go before the config": ({"chat_template": "C"}, {f"{MORE}/tool_use.jinja": "T"}),
    "a default among more files": ({}, {FILE: "F", f"{MORE}/default.jinja": "A"}),
    "a processor's file behind the config": ({"chat_template": "C"}, {PROCESSOR: {"chat_template": "P"}}),
    "empty": ({"chat_template": ""}, {}),
    "empty file": ({"chat_template": "C"}, {FILE: ""}),
    "none": ({}, {}),
    "null": ({"chat_template": None}, {}),
}


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_are_found_where_transformers_finds_them(tmp_path, name, tools):
    folder = write(tmp_path, *TEMPLATES[name])
    try:
        want = AutoTokenizer.from_pretrained(folder).apply_chat_template(USER, tools=tools, tokenize=False)
    except ValueError:
        want = None
    try:
        variables = None if tools is None else {"tools": tools}
        found = load_tokenizer(folder).render_chat(USER, variables=variables)
    except ValueError:
        found = None
    assert found == want


@pytest.mark.parametrize("content", ["P", LISTED, {"default": "D"}])
def test_a_processor_s_template_is_read_where_there_is_no_other(tmp_path, content):
    folder = write(tmp_path, {}, {PROCESSOR: {"chat_template": content}})
    assert load_tokenizer(folder).render_chat(USER) in ("P", "D")


@pytest.mark.parametrize(
    ("config", "files", "problem"),
    [
        ({"chat_template": 5}, {}, "tokenizer_config.json: the chat template 'default' is int"),
        ({"chat_template": [{"name": "x"}]}, {}, 'without "name" and "template"'),
        ({}, {PROCESSOR: "[1]"}, "chat_template.json must be a JSON object, not list"),
        ({}, {MAP: "{"}, "special_tokens_map.json is not JSON"),
    ],
)
def test_files_of_another_form_are_named(tmp_path, config, files, problem):
    with pytest.raises(ConfigError, match=problem):
        load_tokenizer(write(tmp_path, config, files))


def test_a_template_that_is_no_text_is_named(tmp_path):
    folder = write(tmp_path, {}, {})
    (folder / FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template.jinja can't be read as UTF-8 text"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{# no bos_token here #}T",
        "bos_token",
        "{% set bos_token = 'T' %}{{ bos_token }}",
        "{% generation %}eos_token{% endgeneration %}",
        "{{ bos_token",
        "{{ bos_token | no_such_filter }}",
    ],
)
def test_a_template_without_the_variable_needs_no_default(tmp_path, monkeypatch, template):
    folder = write(tmp_path, {"chat_template": template, "tokenizer_class": "LlamaTokenizer"}, {})
    calls = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: calls.append(1))
    assert load_tokenizer(folder).special_tokens == {}
    assert not calls


@pytest.mark.parametrize(
    "template", ["{% generation %}{{ bos_token }}{% endgeneration %}", "{{- bos_token or '' }}"]
)
def test_a_template_with_the_variable_gets_the_default(tmp_path, template):
    folder = write(tmp_path, {"chat_template": template, "tokenizer_class": "LlamaTokenizer"}, {})
    assert load_tokenizer(folder).special_tokens == {"bos_token": "<s>"}


def plain(folder, *words):
    """A folder of LlamaTokenizer: <s> is a word of the vocabulary at most, not an added token."""
    made = Tokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    write(folder, {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ bos_token }}hi"}, {})
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_a_default_is_one_token_also_where_the_file_does_not_add_it(tmp_path):
    tokenizer = load_tokenizer(plain(tmp_path, "hi", "<", "s", ">", "<unk>", "<s>"))
    rendered = tokenizer.render_chat(USER)
    assert rendered == "<s>hi"
    theirs = AutoTokenizer.from_pretrained(tmp_path).bos_token_id
    assert tokenizer.encode(rendered, add_special_tokens=False) == [theirs, 0]
    assert theirs in tokenizer.special_ids


def test_a_default_outside_the_vocabulary_is_left_out_with_a_warning(tmp_path, caplog):
    tokenizer = load_tokenizer(plain(tmp_path, "hi", "<", "s", ">", "<unk>"))
    assert tokenizer.render_chat(USER) == "hi"
    assert tokenizer.vocab_size == 5
    assert "names no bos_token for the chat template" in caplog.text
    assert "<s> has another id" in caplog.text
