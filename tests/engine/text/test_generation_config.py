# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.core.request import SamplingParams
from moe_lora.engine.text.tokenizer_files import log_generation_config, read_sampling_defaults, unused_fields


def write(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "defaults"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "do_sample": True}, {}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
        ({"top_k": 20.0}, {"top_k": 20}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": None, "top_k": None}, {}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ],
)
def test_five_fields_are_defaults(tmp_path, fields, defaults):
    found = read_sampling_defaults(write(tmp_path, **fields))
    assert found == defaults
    assert isinstance(found.get("top_k", 0), int)
    SamplingParams(**found)


def test_no_file_gives_no_defaults(tmp_path):
    assert read_sampling_defaults(tmp_path) == unused_fields(tmp_path) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": True},
        {"top_k": 1.5},
        {"top_k": float("inf")},
        {"top_k": -2},
        {"min_p": [1]},
        {"repetition_penalty": 0},
    ],
)
def test_a_value_out_of_range_names_file_field_and_way_out(tmp_path, fields):
    with pytest.raises(ConfigError) as caught:
        read_sampling_defaults(write(tmp_path, **fields))
    for part in (str(tmp_path), "generation_config.json", *fields, "--generation-config none"):
        assert part in str(caught.value)


def test_fields_without_an_effect_are_named_unless_they_ask_for_nothing(tmp_path):
    asking = {
        "encoder_repetition_penalty": 1.3,
        "do_sample": False,
        "no_repeat_ngram_size": 3,
        "max_new_tokens": 32,
        "suppress_tokens": [5],
        "num_beams": 4,
        "a_field_of_tomorrow": "x",
    }
    silent = {
        "encoder_repetition_penalty": 1.0,
        "num_beams": 1,
        "do_sample": True,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [],
        "penalty_alpha": None,
    }
    neither = {"eos_token_id": [1, 2], "temperature": 0.5, "transformers_version": "5", "use_cache": True}
    assert unused_fields(write(tmp_path, **asking, **neither)) == asking
    assert unused_fields(write(tmp_path, **silent, **neither)) == {}


def test_the_log_names_what_is_used_and_what_is_not(tmp_path, caplog):
    caplog.set_level("INFO")
    log_generation_config(str(write(tmp_path, temperature=0.6, repetition_penalty=1.3, num_beams=4)))
    assert [record.getMessage() for record in caplog.records] == [
        "generation_config.json: where a request is silent, temperature=0.6, repetition_penalty=1.3",
        "generation_config.json: no effect here: num_beams=4",
    ]
