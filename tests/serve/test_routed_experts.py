# SPDX-License-Identifier: Apache-2.0
"""Chosen experts in answers over HTTP are transformers', in each interface, whole and in streams."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from contextlib import asynccontextmanager
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_lora.assemble import serve, serve_front_end, serve_host
from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import PromptReport, TokenOutput
from moe_lora.engine.text.text import load_tokenizer
from moe_lora.serve.http_errors import to_json
from moe_lora.serve.openai import prompt_side
from moe_lora.serve.openai.endpoints import ChatFormat
from moe_lora.serve.openai.generation import Delta
from moe_lora.serve.openai.routed_experts import with_experts
from tests.families import tiny_config
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


def test_conversations_of_one_body_have_their_experts(demo):  # noqa: F811
    other = [{"role": "user", "content": "abc="}]
    found = ask(demo, "/v1/chat/completions/batch", messages=[CHAT, other], **LIMITS, **ASKED)
    for chat, choice in zip((CHAT, other), found["choices"], strict=True):
        [alone] = ask(demo, "/v1/chat/completions", messages=chat, **LIMITS, **ASKED)["choices"]
        assert choice["routed_experts"] == alone["routed_experts"]


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


class OneChoice:
    """A generation of one choice, with the experts of 40,000 tokens in 4 layers."""

    engine_id, num_choices, prompts = "one", 1, ((5,),)
    rows = np.arange(40000 * 4 * 2, dtype="<i4").astype("<i2")

    def __init__(self) -> None:
        self.source: Any = self

    async def generate(self, request):
        report = PromptReport(experts=(4, 2, self.rows.tobytes()))
        yield TokenOutput(request_id="one-0", token_ids=(1,), finish_reason="length", prompt=report)

    @asynccontextmanager
    async def deltas(self):
        yield self._deltas()

    async def _deltas(self):
        async for _ in self.source.generate(SimpleNamespace(request_id="one-0")):
            yield Delta(0, "", (1,), None, "length")

    def usage_of(self, index):
        return {"total_tokens": 40001}


def test_other_requests_go_on_while_experts_are_encoded(monkeypatch):
    monkeypatch.setattr(prompt_side, "SLICE_S", 0.0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def run() -> Any:
        form, task = ChatFormat(None, with_token_ids=False), asyncio.create_task(other())
        async with with_experts(OneChoice, form).deltas() as deltas:
            [choice] = [form.whole(delta) async for delta in deltas]
        task.cancel()
        return json.loads(to_json(choice))["routed_experts"]

    assert np.array_equal(from_npy(asyncio.run(run())), OneChoice.rows.reshape(40000, 4, 2))
    assert turns > 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "n": 3, "max_tokens": 2}),
        ("/v1/completions", {"prompt": ["hello", "hello", "abc="], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 2, "max_tokens": 8}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 2}),
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT], "max_tokens": 8}),
        ("/inference/v1/generate", {"token_ids": [5] * 9, "sampling_params": {"n": 2, "max_tokens": 8}}),
        ("/generate", {"input_ids": [5] * 9, "sampling_params": {"n": 2, "max_new_tokens": 8}}),
    ],
)
def test_several_choices_have_a_limit_of_experts_before_they_start(tokenizer, path, body, monkeypatch):
    """A character is a token with 4 bytes of experts; one choice may have the context's."""
    monkeypatch.setattr("moe_lora.serve.openai.routed_experts.MAX_BYTES", 20 * 4)
    engine = scripted(tokenizer, expert_bytes=4)
    with serving(engine, tokenizer) as served:
        answer = served.post(path, {**body, "return_routed_experts": True})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "return_routed_experts"
        limit = "max_new_tokens" if path == "/generate" else "max_tokens"
        assert f"and a request has at most 80; lower {limit} or n" in error["message"]
        assert engine.requests == []
        assert served.post(path, {**body, "return_routed_experts": False}).status_code == 200
        alone = {"prompt": "hello hello hello hello", "max_tokens": 2, "return_routed_experts": True}
        assert served.post("/v1/completions", alone).status_code == 200
        fits = {"prompt": "hello", "n": 2, "max_tokens": 4, "return_routed_experts": True}
        assert served.post("/v1/completions", fits).status_code == 200


def test_beams_have_no_experts(demo):  # noqa: F811
    error = refused(demo, prompt=IDS, use_beam_search=True, n=2, return_routed_experts=True)
    assert error["param"] == "return_routed_experts"


def test_a_server_may_send_experts_without_the_field(tokenizer):
    engine = scripted(tokenizer)
    with serving(engine, tokenizer, return_routed_experts=True) as served:
        for fields in ({}, {"return_routed_experts": False}, {"use_beam_search": True, "n": 1}):
            served.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, **fields})
    assert [one.sampling.routed_experts for one in engine.requests[:3]] == [True, False, False]


def test_interfaces_without_a_place_for_experts_do_not_compute_them(tokenizer):
    engine = scripted(tokenizer)
    bodies = {
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {"messages": CHAT, "max_tokens": 2},
        "/v1/chat/completions": {"messages": CHAT},
    }
    with serving(engine, tokenizer, return_routed_experts=True) as served:
        for path, body in bodies.items():
            answer = served.post(path, {"model": "base", **body})
            assert answer.status_code == 200, answer.text
    assert [one.sampling.routed_experts for one in engine.requests] == [False, False, True]


@pytest.mark.parametrize("start", [serve, lambda cluster: serve_host(cluster, 2), serve_front_end])
def test_a_dense_model_refuses_experts_in_all_answers_at_start(start, tmp_path, monkeypatch):
    def started(work) -> None:
        work.close()
        pytest.fail("started")

    monkeypatch.setattr("moe_lora.assemble._run", started)
    tiny_config("llama").save_pretrained(tmp_path)
    front_end = FrontEndConfig(port=0, engines_address="127.0.0.1:7600", return_routed_experts=True)
    engine = EngineConfig(model_dir=str(tmp_path), device="cpu")
    cluster = ClusterConfig(engine=engine, served_model_name="dense", front_end=front_end)
    with pytest.raises(ConfigError, match=r"return_routed_experts=true needs a model with experts.*leave it"):
        start(cluster)
