# SPDX-License-Identifier: Apache-2.0
"""Several names of the base model, as --served-model-name gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_lora.config.cluster import cluster_text, read_cluster
from moe_lora.core.errors import ConfigError
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.server import create_app

from .conftest import as_served, frontend_of
from .live_server import Served, ServerThread
from .scripted_engine import adapter_info


@pytest.fixture
def named(engine, tokenizer) -> Iterator[Served]:
    one = frontend_of(engine, tokenizer)
    cluster = replace(one.cluster, other_model_names=("publishers/ns/models/base",))
    frontend = Frontend(client=engine, tokenizer=tokenizer, cluster=cluster, controller=one.controller)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        yield served


@pytest.mark.parametrize("name", ["base", "publishers/ns/models/base"])
def test_each_name_is_the_base_model_and_answers_have_the_first(named, engine, name):
    answer = named.post("/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200
    assert answer.json()["model"] == "base"
    assert engine.requests[-1].adapter is None
    assert named.get(f"/v1/models/{name}").json()["id"] == name


def test_all_names_are_listed_and_taken(named):
    cards = named.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards[:2]] == ["base", "publishers/ns/models/base"]
    assert all(card["parent"] == "base" for card in cards[2:])
    assert named.get("/v1/models/").json()["data"] == cards
    body = {"lora_name": "publishers/ns/models/base", "lora_path": "x"}
    refused = named.post("/v1/load_lora_adapter", body)
    assert refused.status_code == 400
    assert "the base model's name" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({"model": "base:shout"}, "shout"),
        ({"model": "publishers/ns/models/base:shout"}, "shout"),
        ({"model": "base", "lora_path": "shout"}, "shout"),
        ({"model": "base:shout", "lora_path": "shout"}, "shout"),
        ({"model": "shout", "lora_path": "shout"}, "shout"),
        ({"lora_path": "shout"}, "shout"),
        ({"model": "base:"}, None),
        ({"model": "base", "lora_path": ""}, None),
        ({"model": "base:own"}, "base:own"),
    ],
)
def test_an_adapter_of_the_base_is_named_as_in_sglang(named, engine, fields, adapter):
    """An adapter whose own name has this form comes first."""
    engine.adapters["base:own"] = adapter_info("base:own")
    engine.answers = {**engine.answers, "base:own": engine.answers["shout"]}
    for path in ("/v1/completions", "/v1/chat/completions"):
        prompt = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hi"}
        answer = named.post(path, {**prompt, "max_tokens": 2, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == (adapter or "base")
        assert engine.requests[-1].adapter == adapter
    assert named.post("/tokenize", {"prompt": "hello", **fields}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "base:none"}, 404),
        ({"model": "other:shout"}, 404),
        ({"model": "other", "lora_path": "shout"}, 404),
        ({"model": "base", "lora_path": ["shout"]}, 400),
    ],
)
def test_an_unknown_adapter_or_base_is_refused_as_in_sglang(named, fields, status):
    for path in ("/v1/completions", "/tokenize"):
        assert named.post(path, {"prompt": "hello", **fields}).status_code == status


@pytest.mark.parametrize("model", ["shout", "base:shout"])
def test_a_check_of_a_name_calls_no_instance(named, engine, monkeypatch, model):
    """A list of 10,000 adapters would stop all streams for most of a second."""
    monkeypatch.delattr(type(engine), "list_adapters")
    engine.hidden = bytes(8)
    turn = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/completions/render", {"prompt": "hello"}),
        ("/v1/chat/completions", {**turn, "max_tokens": 1}),
        ("/v1/chat/completions/render", turn),
        ("/v1/messages/count_tokens", turn),
        ("/v1/embeddings", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
    ):
        assert named.post(path, {"model": model, **body}).status_code == 200, path
    assert named.post("/tokenize", {"model": "base:none", "prompt": "hello"}).status_code == 404


def test_a_file_may_list_them(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "cluster.yaml"
    file.write_text("model_dir: model\nserved_model_name: [a, b, a]\n")
    cluster = read_cluster(file)
    assert (cluster.served_model_name, cluster.other_model_names) == ("a", ("b",))
    file.write_text(cluster_text(cluster))
    assert read_cluster(file) == cluster
    file.write_text("model_dir: model\nserved_model_name: [a, b]\nadapters: {b: x}\n")
    with pytest.raises(ConfigError, match="'b' names the base model and an adapter"):
        read_cluster(file)
    for bad in ("[]", "[a, 1]", "['']"):
        file.write_text(f"model_dir: model\nserved_model_name: {bad}\n")
        with pytest.raises(ConfigError, match="served_model_name"):
            read_cluster(file)
