# SPDX-License-Identifier: Apache-2.0
"""Chosen experts in answers over HTTP are transformers', in each interface, whole and in streams."""

from __future__ import annotations

import json
from base64 import b64decode
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from moe_lora.engine.text.text import load_tokenizer
from tests.oracle import reference_experts

from .conftest import scripted, serving
from .test_prompt_side import MODEL, NAMES, UPPER, ask, demo, refused  # noqa: F401  (the fixture)

TOKENIZER = load_tokenizer(MODEL)
IDS = TOKENIZER.encode("hello world=")
CHAT = [{"role": "user", "content": "hello"}]
LIMITS = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
ASKED = {"return_routed_experts": True, "return_token_ids": True}


def from_npy(text: str) -> np.ndarray:
    return np.load(BytesIO(b64decode(text)))


def last_event(server, path: str, **body) -> tuple[dict[str, Any], list[int]]:
    """The last choice of a stream, and all token ids.  Earlier choices have no experts."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert not any("routed_experts" in one for one in choices[:-1])
    return choices[-1], [token for one in choices for token in one.get("token_ids", ())]


@pytest.mark.parametrize("model", NAMES)
def test_the_experts_of_all_tokens_but_the_last_are_transformers_s(demo, model):  # noqa: F811
    body = {"model": model, "prompt": IDS, **LIMITS, **ASKED}
    ask(demo, **{**body, "return_routed_experts": False})  # the prompt is in the prefix cache
    [choice] = ask(demo, **body)["choices"]
    tokens = [*IDS, *choice["token_ids"]][:-1]
    expected = reference_experts(MODEL, NAMES[model], tokens).numpy()
    found = from_npy(choice["routed_experts"])
    assert found.dtype == np.int16
    assert np.array_equal(found, expected)
    last, token_ids = last_event(demo, "/v1/completions", **body)
    assert token_ids == choice["token_ids"]
    assert last["routed_experts"] == choice["routed_experts"]
    assert "routed_experts" not in ask(demo, **{**body, "return_routed_experts": None})["choices"][0]


def test_each_interface_has_its_form(demo):  # noqa: F811
    [plain] = ask(demo, prompt=IDS, **LIMITS, **ASKED)["choices"]
    tokens = {"token_ids": IDS, "sampling_params": LIMITS, "return_routed_experts": True}
    for mode in ("tokens", "text", "derender"):
        [choice] = ask(demo, "/inference/v1/generate", **tokens, output_mode=mode)["choices"]
        assert choice["routed_experts"] == plain["routed_experts"]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    native = ask(demo, "/generate", input_ids=IDS, sampling_params=sampling, return_routed_experts=True)
    numbers = np.frombuffer(b64decode(native["meta_info"]["routed_experts"]), dtype=np.int32)
    assert np.array_equal(numbers, from_npy(plain["routed_experts"]).reshape(-1))
    chat = {"messages": CHAT, **LIMITS, **ASKED}
    found = ask(demo, "/v1/chat/completions", **chat, separate_reasoning=True, n=2)
    answers = [[*found["prompt_token_ids"], *one["token_ids"]] for one in found["choices"]]
    for one, answered in zip(found["choices"], answers, strict=True):
        expected = reference_experts(MODEL, None, answered[:-1]).numpy()
        assert np.array_equal(from_npy(one["routed_experts"]), expected)
    rendered = ask(demo, "/v1/chat/completions/render", **chat)
    again = ask(demo, "/inference/v1/generate", **rendered)["choices"][0]
    assert again["routed_experts"] == found["choices"][0]["routed_experts"]


@pytest.mark.parametrize("more", [{"lora": [{"name": "upper"}]}, {"echo": True, "prompt_logprobs": 1}])
def test_experts_come_beside_other_fields(demo, more):  # noqa: F811
    [choice] = ask(demo, prompt=IDS, **LIMITS, **ASKED, **more)["choices"]
    adapter = UPPER if "lora" in more else None
    expected = reference_experts(MODEL, adapter, [*IDS, *choice["token_ids"]][:-1]).numpy()
    assert np.array_equal(from_npy(choice["routed_experts"]), expected)


def test_a_stop_string_ends_the_experts_too(demo):  # noqa: F811
    [whole] = ask(demo, prompt=IDS, **LIMITS, **ASKED)["choices"]
    stop = whole["text"][1:3]
    [choice] = ask(demo, prompt=IDS, **LIMITS, **ASKED, stop=stop)["choices"]
    assert choice["finish_reason"] == "stop"
    found, all_of_them = from_npy(choice["routed_experts"]), from_npy(whole["routed_experts"])
    assert len(found) == len(IDS) + len(choice["token_ids"]) - 1 < len(all_of_them)
    assert np.array_equal(found, all_of_them[: len(found)])


def test_a_prompt_alone_has_the_experts_before_its_last_token(demo):  # noqa: F811
    [choice] = ask(demo, prompt=IDS, **{**LIMITS, "max_tokens": 0}, **ASKED, echo=True)["choices"]
    expected = reference_experts(MODEL, None, IDS[:-1]).numpy()
    assert np.array_equal(from_npy(choice["routed_experts"]), expected)


def test_beams_have_no_experts(demo):  # noqa: F811
    error = refused(demo, prompt=IDS, use_beam_search=True, n=2, return_routed_experts=True)
    assert error["param"] == "return_routed_experts"


def test_a_server_may_send_experts_without_the_field(tokenizer):
    engine = scripted(tokenizer)
    with serving(engine, tokenizer, return_routed_experts=True) as served:
        for fields in ({}, {"return_routed_experts": False}, {"use_beam_search": True, "n": 1}):
            served.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, **fields})
    assert [one.sampling.routed_experts for one in engine.requests[:3]] == [True, False, False]
