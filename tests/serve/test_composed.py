# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of adapters in requests, over real servers, against transformers and peft."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lora.core.errors import AdapterError, AdapterNotFoundError
from moe_lora.serve import composing
from moe_lora.serve.api_keys import add_key
from moe_lora.serve.composing import MAX_COMPOSED
from moe_lora.serve.server import create_app
from tests.dist.cluster_jobs import until
from tests.families import load_model

from .conftest import as_served, frontend_of
from .demo_server import DEMO, DemoServer, demo_server
from .live_server import ServerThread, wait_until
from .test_access import rights
from .test_controls import OPTIONS, SEVERAL, Http

PROMPTS = ("abcdefgh=", "Hello wor=", "xyz=")
NUM_TOKENS = 10
ATTENTION = {"wide": 5, "narrow": 2}
"""Adapters without experts, and their ranks."""


def make_attention(folder: Path) -> None:
    """Adapters of attention alone, large enough to change tokens."""
    from peft import LoraConfig, get_peft_model

    for seed, (name, lora_rank) in enumerate(ATTENTION.items()):
        torch.manual_seed(seed)
        targets = ["q_proj", "v_proj", "o_proj"][seed:]
        config = LoraConfig(r=lora_rank, lora_alpha=4 + seed, target_modules=targets, use_rslora=bool(seed))
        model = get_peft_model(load_model(DEMO / "model", torch.float32), config)
        for key, value in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(value, std=0.3)
        model.save_pretrained(folder / name)


def greedy(model: Any, token_ids: list[int]) -> list[int]:
    found = list(token_ids)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(token_ids) :]


def peft_sum(folder: Path, weights: Mapping[str, float]) -> Any:
    """peft's own sum of concatenated ranks.  The first adapter is without rslora, else peft scales twice."""
    from peft import PeftModel

    names = list(weights)
    model = PeftModel.from_pretrained(
        load_model(DEMO / "model", torch.float32), folder / names[0], adapter_name=names[0]
    )
    for name in names[1:]:
        model.load_adapter(folder / name, adapter_name=name)
    model.add_weighted_adapter(names, list(weights.values()), "sum", combination_type="cat")
    model.set_adapter("sum")
    return model


def merged_sum(weights: Mapping[str, float]) -> Any:
    """W + sum of w (W_k - W), as peft merges one adapter at a time: its sums refuse `target_parameters`."""
    from peft import PeftModel

    made = load_model(DEMO / "model", torch.float32)
    base = {name: value.clone() for name, value in made.state_dict().items()}
    for adapter, weight in weights.items():
        one = PeftModel.from_pretrained(
            load_model(DEMO / "model", torch.float32), DEMO / "adapters" / adapter
        ).merge_and_unload()
        for name, value in one.state_dict().items():
            made.state_dict()[name].add_(weight * (value - base[name]))
    return made


def terms(weights: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight} for name, weight in weights.items()]


def complete(http: Http, weights: Mapping[str, float], prompt: Any = PROMPTS[0], **fields: Any) -> Any:
    body = {
        "prompt": prompt,
        "lora": terms(weights),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    return http.ok("POST", "/v1/completions", json=body)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[DemoServer]:
    folder = tmp_path_factory.mktemp("composed")
    make_attention(folder / "attention")
    modules = [f"{name}={folder / 'attention' / name}" for name in ATTENTION]
    options = (*OPTIONS, "--lora-modules", *modules, *SEVERAL)
    with demo_server(folder / "log", *options) as server:
        server.attention = folder / "attention"  # type: ignore[attr-defined]
        said = r"instance instance-\d dialled in"
        until(lambda: len(re.findall(said, server.log.read_text())) >= 6, server.log.read_text)
        yield server


def test_attention_is_summed_as_peft_sums(server):
    weights = {"wide": 0.8, "narrow": -1.25}
    model, http, seen = peft_sum(server.attention, weights), Http(server.url), set()
    for prompt in PROMPTS:
        answer = complete(http, weights, prompt)
        [choice] = answer["choices"]
        assert choice["token_ids"] == greedy(model, choice["prompt_token_ids"])
        seen.add(answer["model"])
    assert len(seen) == 1


def test_experts_are_summed_as_merged_weights(server):
    weights = {"upper": 0.6, "reverse": 0.5}
    model, http = merged_sum(weights), Http(server.url)
    for prompt in PROMPTS:
        [choice] = complete(http, weights, prompt)["choices"]
        assert choice["token_ids"] == greedy(model, choice["prompt_token_ids"])


def test_a_weight_of_one_is_the_adapter_and_a_term_keeps_its_own_kv(server):
    http = Http(server.url)
    alone = http.ok(
        "POST",
        "/v1/completions",
        json={"model": "upper", "prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0},
    )
    for _ in range(2):  # the second finds computed prompts
        for weights, text in (({"upper": 1}, alone["choices"][0]["text"]), ({"upper": 0}, None)):
            answer = complete(http, weights, ignore_eos=False)
            assert answer["model"].startswith("composed:")
            if text is not None:
                assert answer["choices"][0]["text"] == text
            else:
                base = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0}
                assert (
                    answer["choices"][0]["text"]
                    == http.ok("POST", "/v1/completions", json=base)["choices"][0]["text"]
                )


def test_a_sum_outlives_a_killed_instance(server):
    http, weights = Http(server.url), {"rot13": 1, "upper": 0.1}
    before = complete(http, weights)
    os.kill(server.engine_pids()[0], signal.SIGKILL)
    for _ in range(6):
        answer = complete(http, weights)
        assert (answer["model"], answer["choices"]) == (before["model"], before["choices"])
    wait_until(lambda: sum(one["live"] for one in http.ok("GET", "/v1/instances")["data"]) == 2, "both live")
    for _ in range(6):
        assert complete(http, weights)["choices"] == before["choices"]


def test_chats_and_streams_take_sums(server):
    http = Http(server.url)
    body = {"messages": [{"role": "user", "content": "abc="}], "lora": terms({"upper": 1}), "max_tokens": 2}
    assert http.ok("POST", "/v1/chat/completions", json=body)["model"].startswith("composed:")
    text = http.ok(
        "POST", "/v1/completions", json={"prompt": "a=", "lora": terms({"upper": 1}), "stream": True}
    )
    assert '"model": "composed:' in text


def test_a_rendered_prompt_keeps_its_sum(server):
    http = Http(server.url)
    body = {"prompt": PROMPTS[0], "lora": terms({"upper": 0.5}), "temperature": 0, "max_tokens": NUM_TOKENS}
    [rendered] = http.ok("POST", "/v1/completions/render", json=body)
    found = http.ok("POST", "/inference/v1/generate", json=rendered)
    expected = complete(http, {"upper": 0.5}, ignore_eos=False)
    assert found["model"] == expected["model"]
    assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/generate", "/tokenize"]
)
def test_an_endpoint_without_sums_refuses_them(server, path):
    key = "text" if path == "/generate" else "input"
    answer = Http(server.url)("POST", path, json={key: "a=", "lora": terms({"upper": 1})})
    assert answer.status_code == 400
    assert "lora" in answer.text


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"lora": "upper"}, 400, "name a single adapter in model"),
        ({"lora": {"upper": 1}}, 400, "name a single adapter in model"),
        ({"lora": [{"name": "nobody"}]}, 404, "'nobody', and it does not exist"),
        ({"lora": [{"name": "upper"}, {"name": "upper"}]}, 400, "twice"),
        ({"lora": [{"name": "upper"}], "model": "upper"}, 400, "needs the base model"),
        ({"lora": [{"name": "upper", "weight": "much"}]}, 400, "weight"),
        ({"lora": [{"name": "upper", "weight": 1e9}]}, 400, "weight"),
        ({"lora": [{"weight": 1}]}, 400, "name"),
        ({"lora": [{"name": "upper", "scale": 1}]}, 400, "scale"),
        ({"lora": [{"name": "upper"}] * 9}, 400, "lora"),
    ],
)
def test_a_wrong_sum_is_refused(server, fields, status, said):
    answer = Http(server.url)("POST", "/v1/completions", json={"prompt": "a=", **fields})
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_an_empty_sum_is_the_model(server, value):
    answer = Http(server.url).ok("POST", "/v1/completions", json={"prompt": "a=", "lora": value})
    assert answer["model"] == "demo"


def test_rights_to_each_term_and_ranks(tmp_path):
    file = tmp_path / "keys.json"
    ops, acme = (add_key(file, one) for one in (rights("ops", admin=True), rights("acme", "upper", "rot*")))
    options = (*OPTIONS, "--api-keys", str(file), "--max-lora-rank", "16")
    with demo_server(tmp_path / "log", *options) as server:
        ops, acme = (Http(server.url, key) for key in (ops, acme))
        answer = complete(acme, {"upper": 0.5, "rot13": 0.5})
        body = {"model": answer["model"], "prompt": "a="}
        assert acme("POST", "/v1/completions", json=body).status_code == 404, "by name it is nobody's"
        refused = {"prompt": "a=", "lora": terms({"upper": 0.5, "reverse": 0.5})}
        assert acme("POST", "/v1/completions", json=refused).status_code == 404
        large = ops(
            "POST", "/v1/completions", json={"prompt": "a=", "lora": terms({"reverse-r16": 1, "upper": 1})}
        )
        assert large.status_code == 400
        assert "LoRA rank 20 is above max_lora_rank=16" in large.json()["error"]["message"]


@pytest.mark.slow
def test_front_ends_that_unload_sums_at_once_end_no_request(server):
    """A sum is chosen at one front end while the other unloads it; streams of others go on."""
    http = Http(server.url)
    weights = [{"upper": 1 + number % 48 / 64, "rot13": 0.25} for number in range(192)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: complete(http, one, max_tokens=3), weights))
    for number, answer in enumerate(answers):
        assert answer["choices"][0]["token_ids"] == answers[number % 48]["choices"][0]["token_ids"]


def test_a_sum_that_another_front_end_unloads_is_loaded_again(engine, tokenizer, monkeypatch):
    frontend, generate, calls = frontend_of(engine, tokenizer), engine.generate, []
    call = engine.call

    async def note(verb: str, *args: Any, **words: Any) -> Any:
        calls.append((verb, *args))
        return await call(verb, *args, **words)

    def unloaded(request: Any) -> Any:
        if [one[0] for one in calls].count("load_adapter") < 3:
            raise AdapterNotFoundError(f"adapter {request.adapter!r} is not loaded")
        return generate(request)

    monkeypatch.setattr(engine, "call", note)
    monkeypatch.setattr(engine, "generate", unloaded)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        body = {"prompt": "a", "max_tokens": 1, "lora": terms({"shout": 0.5})}
        assert served.post("/v1/completions", body).status_code == 200
        monkeypatch.setattr(engine, "generate", refuse_all)
        assert served.post("/v1/completions", body).status_code == 404


def refuse_all(request: Any) -> Any:
    raise AdapterNotFoundError(f"adapter {request.adapter!r} is not loaded")


def test_sums_that_fail_or_ended_are_not_remembered(engine, tokenizer, monkeypatch):
    frontend = frontend_of(engine, tokenizer)
    body = {"prompt": "a", "max_tokens": 1}
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:

        def status(weight: float) -> int:
            return served.post("/v1/completions", {**body, "lora": terms({"shout": weight})}).status_code

        with monkeypatch.context() as patch:
            patch.setattr(engine, "call", refuse)
            assert status(0.5) == 400
        assert not frontend.composed_s
        monkeypatch.setattr(composing, "START_S", 0.0)
        assert {status(number) for number in range(MAX_COMPOSED + 4)} == {200}
        assert len(frontend.composed_s) == 1
        assert sum(name.startswith("composed:") for name in engine.adapters) == MAX_COMPOSED


async def refuse(*args: Any, **words: Any) -> None:
    raise AdapterError("no adapter fits")
