# SPDX-License-Identifier: Apache-2.0
"""The registry over HTTP: a scripted engine for the interface, the demo's model for what is computed."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from moe_lora.adapters.peft.files import WEIGHTS_FILE
from moe_lora.adapters.registry.base_model import base_model_hash
from moe_lora.adapters.registry.registry import Registry
from moe_lora.config import EngineConfig, RegistryConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, ConfigError, RegistryError
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.cluster_controller import ClusterController
from moe_lora.dist.cluster.controller.served_registry import ServedRegistry, opened_registry
from moe_lora.dist.cluster.instances import InstanceRegistry
from tests.adapters.peft_folders import BASE, OTHER_BASE, alter, peft_folder
from tests.dist.cluster.fleet_parts import CountingEngine
from tests.dist.lora_server.cluster import until
from tests.grids import with_quick

from .conftest import app_of, as_served
from .demo_server import DEMO, demo_server

ADAPTERS, LOAD = "/v1/registry/adapters", "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


@pytest.fixture
def registry(tmp_path):
    with Registry(tmp_path / "registry", create=True) as opened:
        yield opened


@pytest.fixture
def source(tmp_path):
    """content → PEFT folder."""
    return lambda content: str(peft_folder(tmp_path / f"source-{content}", content))


@pytest.fixture
def with_registry(shared_thread, engine, tokenizer, registry):
    switch, url = shared_thread
    switch.app = app_of(engine, tokenizer, registry=ServedRegistry(registry, BASE))
    with as_served(url, engine) as served:
        yield served


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == status
    return response.json()["error"]["message"]


def data(response):
    assert response.status_code == 200, response.text
    return response.json()["data"]


def place(name):
    return f"{ADAPTERS}/{quote(name, safe='')}"


def test_what_is_registered_is_listed_shown_loaded_by_name_and_removed(
    with_registry, registry, source, engine
):
    server = with_registry
    added = server.post(ADAPTERS, {"lora_name": "new", "lora_path": source(1), "owner": "me"}).json()
    assert (added["version"], added["state"], added["owner"], added["base_hash"]) == (1, "ready", "me", BASE)
    assert data(server.get(ADAPTERS)) == [added] == data(server.get(place("new")))
    assert server.post(LOAD, {"lora_name": "new"}).status_code == 200
    assert engine.adapters["new"].path == added["path"] == registry.get("new").path
    assert "being served" in error_of(server.http.delete(place("new")), 400)
    assert server.post(UNLOAD, {"lora_name": "new"}).status_code == 200
    assert [one["version"] for one in data(server.http.delete(place("new")))] == [1]
    assert [one["state"] for one in data(server.get(place("new")))] == ["removed"]
    assert data(server.get(ADAPTERS)) == []
    assert not Path(added["path"]).exists()


def test_a_new_version_is_loaded_in_place_and_the_old_one_can_go(with_registry, engine, source):
    server = with_registry
    for content in (1, 2, 2):
        added = server.post(ADAPTERS, {"lora_name": "new", "lora_path": source(content)}).json()
        inplace = {"lora_name": "new", "load_inplace": True}
        assert server.post(LOAD, inplace).status_code == 200
    assert added["version"] == 2
    assert engine.adapters["new"].path == added["path"]
    assert "being served" in error_of(server.http.delete(place("new") + "?version=2"), 400)
    assert [one["version"] for one in data(server.http.delete(place("new") + "?version=1"))] == [1]


def test_damage_is_a_400_that_names_file_and_way_out(with_registry, registry, source):
    server = with_registry
    server.post(ADAPTERS, {"lora_name": "new", "lora_path": source(1)})
    assert data(server.post("/v1/registry/check", {})) == [{"name": "new", "version": 1, "problem": None}]
    path = Path(registry.get("new").path) / WEIGHTS_FILE
    alter(path)
    message = error_of(server.post(LOAD, {"lora_name": "new"}), 400)
    assert f"{path} was altered; add it again from its source" in message
    assert "altered" in data(server.post("/v1/registry/check", {}))[0]["problem"]
    assert [one["name"] for one in data(server.get(ADAPTERS + "?state=broken"))] == ["new"]
    server.post(ADAPTERS, {"lora_name": "new", "lora_path": source(1)})
    assert server.post(LOAD, {"lora_name": "new"}).status_code == 200


def test_another_bases_adapter_is_refused(with_registry, registry, source):
    registry.add("foreign", source(1), base_hash=OTHER_BASE)
    assert "cccccccccccc" in error_of(with_registry.post(LOAD, {"lora_name": "foreign"}), 400)
    body = {"lora_name": "foreign", "lora_path": source(2)}
    assert "choose another name" in error_of(with_registry.post(ADAPTERS, body), 400)


def test_lists_go_on_behind_a_name(with_registry, registry, source):
    for name in ("a", "b/c d", "e"):
        registry.add(name, source(1), base_hash=BASE)
    first = with_registry.get(ADAPTERS + "?limit=2").json()
    assert ([one["name"] for one in first["data"]], first["has_more"]) == (["a", "b/c d"], True)
    rest = with_registry.get(f"{ADAPTERS}?limit=2&after={quote('b/c d')}").json()
    assert ([one["name"] for one in rest["data"]], rest["has_more"]) == (["e"], False)
    assert [one["name"] for one in data(with_registry.get(place("b/c d")))] == ["b/c d"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"lora_name": "x"},
        {"lora_name": "", "lora_path": "x"},
        {"lora_name": "base", "lora_path": "x"},
        {"lora_name": "a,b", "lora_path": "x"},
        {"lora_name": "x", "lora_path": ""},
        {"lora_name": "x", "lora_path": None},
        {"lora_name": "x", "lora_path": "y", "owner": 5},
        {"lora_name": "x", "lora_path": "y", "state": "ready"},
        {"lora_name": "x\ud800", "lora_path": "y"},
    ],
)
def test_bad_bodies_are_400(with_registry, registry, body):
    error_of(with_registry.post(ADAPTERS, body), 400)
    assert registry.adapters() == []


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=999999", "state=removed", "state="])
def test_bad_queries_are_400(with_registry, query):
    assert query.split("=")[0] in error_of(with_registry.get(f"{ADAPTERS}?{query}"), 400)


def test_unfit_files_and_owners_are_refused(with_registry, source):
    def post(**fields):
        return with_registry.post(ADAPTERS, {"lora_name": "x", **fields})

    error_of(post(lora_path="no/such/dir"), 404)
    assert "owner" in error_of(post(lora_path=source(1), owner="a\nb"), 400)
    folder = source(1)
    (Path(folder) / WEIGHTS_FILE).unlink()
    assert WEIGHTS_FILE in error_of(post(lora_path=folder), 400)


def test_unknown_names_are_404(with_registry):
    for response in (
        with_registry.get(place("nobody")),
        with_registry.http.delete(place("nobody")),
        with_registry.post(LOAD, {"lora_name": "nobody"}),
        with_registry.get(f"{ADAPTERS}/%ED%A0%80"),
    ):
        assert "registry" in error_of(response, 404)
    error_of(with_registry.http.delete(place("nobody") + "?version=0"), 400)


def test_a_registry_that_fails_is_503_with_the_file(with_registry, registry):
    registry.close()
    assert "registry.sqlite" in error_of(with_registry.get(ADAPTERS), 503)


def test_without_a_registry_there_is_none(server):
    assert "--registry" in error_of(server.get(ADAPTERS), 404)
    assert "--registry" in error_of(server.post(ADAPTERS, {"lora_name": "x", "lora_path": "y"}), 404)
    assert "--registry" in error_of(server.post(LOAD, {"lora_name": "x"}), 400)


MODEL = DEMO / "model"


@pytest.fixture
def stocked(tmp_path) -> Path:
    """A registry with two adapters of the demo, and one of another base."""
    folder = tmp_path / "stocked"
    with Registry(folder, create=True) as registry:
        for name in ("upper", "rot13"):
            registry.add(name, DEMO / "adapters" / name, base_hash=base_model_hash(MODEL))
        registry.add("foreign", peft_folder(tmp_path / "foreign", 1), base_hash=OTHER_BASE)
    return folder


def started(folder, *, chosen=None, adapters=(), name="base"):
    cluster = ClusterConfig(
        engine=EngineConfig(model_dir=str(MODEL), adapters=adapters),
        served_model_name=name,
        registry=RegistryConfig(folder=str(folder), adapters=chosen),
    )
    with opened_registry(cluster) as (found, _):
        return [name for name, _ in found.engine.adapters]


def test_adapters_of_this_base_are_served_from_the_start_or_those_chosen(stocked):
    assert started(stocked, adapters=(("mine", "p"),)) == ["mine", "rot13", "upper"]
    assert started(stocked, chosen=("upper",)) == ["upper"]
    assert started(stocked, chosen=()) == []


def test_damaged_adapters_are_left_out_at_the_start_unless_they_were_chosen(stocked, caplog):
    with Registry(stocked) as registry:
        alter(Path(registry.get("upper").path) / WEIGHTS_FILE)
    with caplog.at_level(logging.ERROR):
        assert started(stocked) == ["rot13"]
    assert "left out: adapter 'upper'" in caplog.text
    with pytest.raises(AdapterError, match="altered"):
        started(stocked, chosen=("upper",))


def test_an_earlier_release_s_name_stops_no_start_and_can_be_removed(stocked, monkeypatch, caplog):
    old = "composed:old"
    with Registry(stocked) as registry, monkeypatch.context() as earlier:
        earlier.setattr("moe_lora.adapters.registry.registry.name_problem", lambda name: None)
        registry.add(old, DEMO / "adapters" / "upper", base_hash=base_model_hash(MODEL))
    with caplog.at_level(logging.ERROR):
        assert started(stocked) == ["rot13", "upper"]
    assert f"left out: the name {old!r} starts with" in caplog.text
    with Registry(stocked) as registry:
        assert [one.version for one in registry.remove(old)] == [1]
    caplog.clear()
    assert started(stocked) == ["rot13", "upper"]
    assert not caplog.records


def test_starts_that_can_not_be_are_refused(stocked, tmp_path):
    with pytest.raises(ConfigError, match="'upper' of the registry"):
        started(stocked, adapters=(("upper", "p"),))
    with pytest.raises(ConfigError, match="'upper' of the registry"):
        started(stocked, name="upper")
    with pytest.raises(AdapterError, match="registered for the base model"):
        started(stocked, chosen=("foreign",))
    with pytest.raises(AdapterNotFoundError, match="nobody"):
        started(stocked, chosen=("nobody",))
    with pytest.raises(RegistryError, match="no registry at"):
        started(tmp_path / "nowhere")


def test_the_demo_serves_its_registry_and_a_version_registered_while_it_runs(stocked, tmp_path):
    options = ("--registry", str(stocked), "--set", "registry.adapters=upper", "--eager")
    with (
        demo_server(tmp_path / "log", *options) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):

        def answer(model: str) -> str:
            body = {"model": model, "prompt": "abcdefgh=", "max_tokens": 20, "temperature": 0}
            return json.loads(http.post("/v1/completions", json=body).text)["choices"][0]["text"]

        assert {card["id"] for card in http.get("/v1/models").json()["data"]} == {"demo", "upper"}
        assert answer("upper") == "ABCDEFGH"
        assert http.post(LOAD, json={"lora_name": "rot13"}).status_code == 200
        assert answer("rot13") == "nopqrstu"
        body = {"lora_name": "upper", "lora_path": str(DEMO / "adapters" / "rot13")}
        assert http.post(ADAPTERS, json=body).json()["version"] == 2
        assert answer("upper") == "ABCDEFGH", "registering does not load"
        assert http.post(LOAD, json={"lora_name": "upper", "load_inplace": True}).status_code == 200
        assert answer("upper") == "nopqrstu"
        foreign = http.post(LOAD, json={"lora_name": "foreign"})
        assert foreign.status_code == 400
        assert "base model" in foreign.json()["error"]["message"]


LARGE = str(DEMO / "adapters" / "reverse-r16")


@pytest.fixture
def with_large(tmp_path) -> Path:
    """A registry with adapters of rank 4 and 16."""
    folder = tmp_path / "with-large"
    with Registry(folder, create=True) as registry:
        registry.add("upper", DEMO / "adapters" / "upper", base_hash=base_model_hash(MODEL))
        registry.add("large", LARGE, base_hash=base_model_hash(MODEL))
    return folder


@pytest.mark.parametrize(
    "layout",
    with_quick([(), ("--front-ends", "2"), ("--instances", "2", "--set", "pool.replicas=1")], [()]),
    ids=len,
)
def test_adapters_above_the_rank_limit_are_unavailable_and_new_ones_are_refused(with_large, tmp_path, layout):
    options = ("--registry", str(with_large), "--max-lora-rank", "8", "--eager", *layout)
    with (
        demo_server(tmp_path / "log", *options) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):

        def cards() -> dict[str, dict]:
            return {card["id"]: card for card in http.get("/v1/adapters").json()["data"]}

        def ask(model: str) -> httpx.Response:
            return http.post("/v1/completions", json={"model": model, "prompt": "abc=", "max_tokens": 2})

        said = "the LoRA rank 16 is above max_lora_rank=8"
        until(lambda: set(cards()) == {"large", "upper"}, "all are listed")
        until(lambda: said in (cards()["large"]["problem"] or ""), "the reason is known")
        assert cards()["large"]["residency"] == "unavailable"
        assert cards()["upper"]["residency"] != "unavailable"
        refused = ask("large")
        assert said in error_of(refused, 503)
        assert ask("upper").status_code == 200
        for path, body in (
            (ADAPTERS, {"lora_name": "later", "lora_path": LARGE}),
            (LOAD, {"lora_name": "later", "lora_path": LARGE}),
            (LOAD, {"lora_name": "large", "load_inplace": True}),
        ):
            assert said in error_of(http.post(path, json=body), 400)
        assert "later" not in http.get(ADAPTERS).text
        assert ask("upper").status_code == 200
        assert http.post(UNLOAD, json={"lora_name": "large"}).status_code == 200
        assert set(cards()) == {"upper"}
    assert "the engine failed" not in (tmp_path / "log").read_text()


def test_a_named_adapter_above_the_rank_limit_is_refused_before_anything_starts(with_large):
    cluster = ClusterConfig(
        engine=EngineConfig(model_dir=str(MODEL), max_lora_rank=8),
        served_model_name="base",
        registry=RegistryConfig(folder=str(with_large), adapters=("large",)),
    )
    with (
        pytest.raises(AdapterError, match="'large': the LoRA rank 16 is above max_lora_rank=8"),
        opened_registry(cluster),
    ):
        pass


def test_publishing_is_refused_by_the_limit_of_the_devices(registry, tmp_path):
    """CUDA has a limit of its own, which instances say by the names of their devices."""
    instances = InstanceRegistry([CountingEngine()])
    controller = ClusterController(FleetAdapters(instances), registry=ServedRegistry(registry, BASE))
    large = str(peft_folder(tmp_path / "large", 1, lora_rank=513))
    assert asyncio.run(controller.call("registry_add", "large", large, "", False)).lora_rank == 513
    instances.instances[0].devices = ("cuda:0",)
    with pytest.raises(AdapterError, match="the LoRA rank 513 is above max_lora_rank=512"):
        asyncio.run(controller.call("registry_add", "larger", large, "", False))
