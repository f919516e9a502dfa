# SPDX-License-Identifier: Apache-2.0
"""Controllers and trainers written for vLLM and SGLang: their bodies, and their own checks of the answers.

Facts are from the public sources of each project (2026-08).
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace

import httpx
import pytest

from .demo_server import DEMO

ADAPTERS = DEMO / "adapters"
UPPER, REVERSE = str(ADAPTERS / "upper"), str(ADAPTERS / "reverse")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def ids(server) -> set[str]:
    return {card["id"] for card in server.get("/v1/models").json()["data"]}


class Syncer:
    """LoRA syncer of Kubernetes' gateway-api-inference-extension, which llm-d uses too."""

    def load(self, server, name: str, path: str) -> bool:
        if server.get("/health").status_code != 200 or name in ids(server):
            return False
        body = {"lora_name": name, "lora_path": path, "base_model_name": server.model}
        return server.post(LOAD, body).is_success

    def unload(self, server, name: str) -> bool:
        return name in ids(server) and server.post(UNLOAD, {"lora_name": name}).is_success


class SyncerWithoutBase(Syncer):
    """As above, without a base model in its config."""

    def load(self, server, name: str, path: str) -> bool:
        body = {"lora_name": name, "lora_path": path, "base_model_name": ""}
        return server.post(LOAD, body).is_success


class KubeAI:
    """Reads message and type at the top of an error; loads again what may be loaded."""

    @staticmethod
    def error(answer: httpx.Response) -> dict:
        return answer.json()

    def load(self, server, name: str, path: str) -> bool:
        for _ in range(2):
            answer = server.post(LOAD, {"lora_name": name, "lora_path": path})
            if answer.status_code > 299 and not self._already(answer):
                return False
        return True

    def _already(self, answer: httpx.Response) -> bool:
        error = self.error(answer)
        is_input = answer.status_code == 400 and error["type"] == "InvalidUserInput"
        return is_input and "already" in error["message"] and "loaded" in error["message"]

    def unload(self, server, name: str) -> bool:
        return server.post(UNLOAD, {"lora_name": name}).status_code <= 299

    def is_gone(self, answer: httpx.Response) -> bool:
        """The answer of vLLM before 2025: today's has another status and type, and is an error to KubeAI."""
        error = self.error(answer)
        is_input = answer.status_code == 400 and error["type"] == "InvalidUserInput"
        return is_input and "cannot be found" in error["message"]


class KubeAISince607(KubeAI):
    """The same since 2025-10, with the error one level down."""

    @staticmethod
    def error(answer: httpx.Response) -> dict:
        return answer.json()["error"]


class AIBrix:
    """Lists models before each load; its runtime sends every field that it has, unused ones as null."""

    def load(self, server, name: str, path: str) -> bool:
        if name in ids(server):
            return False
        return server.post(LOAD, {"lora_name": name, "lora_path": path}).status_code in (200, 201)

    def unload(self, server, name: str) -> bool:
        body = {"lora_name": name, "lora_int_id": None}
        return server.post(UNLOAD, body).status_code in (200, 201)


class AIBrixForSGLang(AIBrix):
    """The same at SGLang's paths."""

    def load(self, server, name: str, path: str) -> bool:
        answer = server.post("/load_lora_adapter", {"lora_name": name, "lora_path": path})
        return answer.status_code in (200, 201)

    def unload(self, server, name: str) -> bool:
        return server.post("/unload_lora_adapter", {"lora_name": name}).status_code in (200, 201)


class ProductionStack:
    """vLLM's production-stack: reads errors at their top, and finds its adapters by their parent."""

    def load(self, server, name: str, path: str) -> bool:
        return all(
            self._send(server, LOAD, {"lora_name": name, "lora_path": path}) for _ in range(2)
        ) and any(
            card["parent"] is not None and card["id"] == name and card["root"] == path
            for card in server.get("/v1/models").json()["data"]
        )

    def _send(self, server, path: str, body: dict) -> bool:
        answer = server.post(path, body)
        if answer.status_code == 400:
            error = answer.json()
            return error["type"] == "InvalidUserInput" and "has already been loaded" in error["message"]
        return answer.status_code == 200

    def unload(self, server, name: str) -> bool:
        return self._send(server, UNLOAD, {"lora_name": name})


class NeMo:
    """NeMo's adapter sidecar loads each adapter again and again; its platform matches parent and base id."""

    def load(self, server, name: str, path: str) -> bool:
        for _ in range(2):
            answer = server.post(LOAD, {"lora_name": name, "lora_path": path})
            if answer.status_code != 200 and not (
                answer.status_code == 400 and "already" in answer.text.lower()
            ):
                return False
        cards = server.get("/v1/models").json()["data"]
        base = next(card for card in cards if card["parent"] is None)
        return base["root"] == base["id"] and any(
            card["id"] == name and card["parent"] == base["id"] for card in cards
        )

    def unload(self, server, name: str) -> bool:
        return server.post(UNLOAD, {"lora_name": name}).status_code == 200


@pytest.mark.parametrize(
    "controller",
    [Syncer, SyncerWithoutBase, KubeAI, KubeAISince607, AIBrix, AIBrixForSGLang, ProductionStack, NeMo],
    ids=lambda kind: kind.__name__,
)
def test_controllers_of_other_servers_find_their_loads_done(any_server, controller):
    controller, name = controller(), f"of-{controller.__name__.lower()}"
    assert controller.load(any_server, name, UPPER)
    assert name in ids(any_server)
    body = {"model": name, "prompt": "hello=", "max_tokens": 2}
    assert any_server.post("/v1/completions", body).status_code == 200
    assert controller.unload(any_server, name)
    assert name not in ids(any_server)


def error_of(answer: httpx.Response) -> dict:
    """The error, which load and unload have at their answer's top too."""
    body = answer.json()
    assert body["object"] == "error"
    assert {key: body[key] for key in ("message", "type", "param", "code")} == body["error"]
    return body["error"]


def test_errors_of_loads_have_the_types_of_vllm(any_server):
    assert any_server.post(LOAD, {"lora_name": "twice", "lora_path": UPPER}).status_code == 200
    again = any_server.post(LOAD, {"lora_name": "twice", "lora_path": UPPER})
    assert (again.status_code, error_of(again)["type"], error_of(again)["code"]) == (
        400,
        "InvalidUserInput",
        400,
    )
    assert any_server.post(UNLOAD, {"lora_name": "twice"}).status_code == 200
    gone = any_server.post(UNLOAD, {"lora_name": "twice"})
    assert (gone.status_code, error_of(gone)["type"]) == (404, "NotFoundError")
    assert "cannot be found" in error_of(gone)["message"]
    for body in ({}, {"lora_name": 5}, {"lora_name": "x", "lora_path": "/nowhere"}, []):
        assert error_of(any_server.post(LOAD, body))["message"]


@pytest.mark.parametrize("controller", [KubeAI, KubeAISince607], ids=lambda kind: kind.__name__)
def test_unload_of_an_unknown_name_is_to_kubeai_what_it_is_from_vllm(any_server, controller):
    """A 404, whose message the controller reports; to it only a 400 says that an adapter is gone."""
    answer = any_server.post(UNLOAD, {"lora_name": "nobody"})
    vllms = {
        "message": "The lora adapter 'nobody' cannot be found.",
        "type": "NotFoundError",
        "param": None,
        "code": 404,
    }
    of_vllm = httpx.Response(404, json={"object": "error", **vllms, "error": vllms})
    assert answer.status_code == of_vllm.status_code
    for found in (answer, of_vllm):
        assert not controller().is_gone(found)
        error = controller().error(found)
        assert (error["type"], error["code"]) == ("NotFoundError", 404)
        assert "'nobody' cannot be found" in error["message"]
    before = {"message": vllms["message"], "type": "InvalidUserInput"}
    assert controller().is_gone(httpx.Response(400, json={**before, "error": before}))


@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter"])
def test_another_base_is_refused_by_name(server, path):
    answer = server.post(path, {"lora_name": "new", "lora_path": UPPER, "base_model_name": "another"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "base_model_name")
    assert "'another'" in error_of(answer)["message"]
    assert "'base'" in error_of(answer)["message"]
    assert ids(server) == {"base", "shout"}


@pytest.mark.parametrize(
    "fields",
    [
        {"base_model_name": None, "lora_int_id": 5, "load_inplace": False, "is_3d_lora_weight": False},
        {"pinned": False, "lora_id": None, "rid": None},
        {"pinned": True, "lora_id": "abc", "rid": "r1"},
        {"is_3d_lora_weight": True},
    ],
)
def test_fields_of_vllm_and_sglang_are_taken(any_server, fields):
    for load, unload in ((LOAD, UNLOAD), ("/load_lora_adapter", "/unload_lora_adapter")):
        answer = any_server.post(load, {"lora_name": "new", "lora_path": UPPER, **fields})
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
        [card] = [one for one in any_server.get("/v1/adapters").json()["data"] if one["id"] == "new"]
        assert card["pinned"] is bool(fields.get("pinned"))
        body = {"lora_name": "new", "base_model_name": any_server.model, "lora_id": None, "rid": None}
        assert any_server.post(unload, body).status_code == 200


def test_an_adapter_that_cannot_be_pinned_does_not_stay(server, engine):
    assert server.post("/v1/adapters/shout/pin", {}).status_code == 200
    answer = server.post(LOAD, {"lora_name": "new", "lora_path": UPPER, "pinned": True})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "pinned")
    assert "not loaded" in error_of(answer)["message"]
    assert ids(server) == {"base", "shout"}


@pytest.mark.parametrize(
    ("says", "warns"), [(True, False), (False, True), (None, False)], ids=["right", "wrong", "silent"]
)
def test_the_file_decides_on_its_layout_and_a_wrong_field_is_a_warning(server, caplog, says, warns):
    keys = (ADAPTERS / "upper" / "adapter_config.json").read_text()
    assert "target_parameters" in keys, "the demo's adapters have parameters of all experts"
    with caplog.at_level(logging.WARNING):
        body = {"lora_name": "new", "lora_path": UPPER, "is_3d_lora_weight": says}
        assert server.post(LOAD, body).status_code == 200
    assert ("is_3d_lora_weight=false" in caplog.text) is warns


def versions(server) -> dict[str, int]:
    return {card["id"]: card["version"] for card in server.get("/v1/adapters").json()["data"]}


class Trainer:
    """prime-rl: one name, a new folder in each step, at the root's path; only the status counts."""

    def __init__(self, server) -> None:
        self.server = server

    def step(self, path) -> int:
        answer = self.server.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": str(path)})
        answer.raise_for_status()
        assert answer.json()["status"] == "ok"
        return versions(self.server)["policy"]


@pytest.fixture
def trainer(any_server):
    yield Trainer(any_server)
    any_server.post(UNLOAD, {"lora_name": "policy"})


def test_at_the_root_a_name_is_replaced_in_place_and_equal_content_is_left_alone(trainer, tmp_path):
    first, copy, live = tmp_path / "1", tmp_path / "2", tmp_path / "live"
    shutil.copytree(UPPER, first)
    shutil.copytree(UPPER, copy)
    shutil.copytree(UPPER, live)
    at_first = trainer.step(first)
    assert trainer.step(first) == at_first, "sent again"
    assert trainer.step(copy) == at_first, "another folder of the same content"
    assert trainer.step(REVERSE) == at_first + 1
    assert trainer.step(live) == at_first + 2
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(f"{REVERSE}/{name}", live / name)
    assert trainer.step(live) == at_first + 3, "a folder written anew"
    assert trainer.step(REVERSE) == at_first + 3


def test_what_another_route_loaded_counts_at_the_root(trainer, tmp_path):
    server = trainer.server
    assert server.post(LOAD, {"lora_name": "policy", "lora_path": UPPER}).status_code == 200
    at_first = versions(server)["policy"]
    assert trainer.step(UPPER) == at_first
    body = {"lora_name": "policy", "lora_path": REVERSE, "load_inplace": True}
    assert server.post(LOAD, body).status_code == 200
    assert trainer.step(UPPER) == at_first + 2, "it is another content by now"
    assert server.post(UNLOAD, {"lora_name": "policy"}).status_code == 200
    assert trainer.step(UPPER) == versions(server)["policy"], "it was unloaded"


def test_lost_content_is_loaded_again(server, engine):
    trainer = Trainer(server)
    at_first = trainer.step(UPPER)
    engine.adapters["policy"] = replace(engine.adapters["policy"], residency="unavailable")
    assert trainer.step(UPPER) == at_first + 1
    assert trainer.step(UPPER) == at_first + 1


def test_files_that_come_later_are_a_404_which_trainers_try_again(any_server, tmp_path):
    body = {"lora_name": "policy", "lora_path": str(tmp_path / "later")}
    assert any_server.post("/load_lora_adapter", body).status_code == 404
    assert any_server.post("/unload_lora_adapter", {"lora_name": "policy"}).status_code == 404
