# SPDX-License-Identifier: Apache-2.0
"""Controllers and trainers written for vLLM and SGLang: their bodies, and their own checks of the answers.

The docstring of a class names its source: repository, file, commit.
"""

from __future__ import annotations

import json
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
    """Kubernetes' LoRA syncer: looks at health and models before each order; any good status is success.

    kubernetes-sigs/gateway-api-inference-extension, tools/dynamic-lora-sidecar/sidecar/sidecar.py, 17824ba8,
    the last commit before 365a1c0b removed the tool.
    """

    def base(self, server) -> str:
        return server.model

    def load(self, server, name: str, path: str) -> bool:
        for _ in range(2):  # each turn of its loop; a name that is listed is left alone
            if server.get("/health").status_code != 200:
                return False
            if name not in ids(server):
                body = {"lora_name": name, "lora_path": path, "base_model_name": self.base(server)}
                server.post(LOAD, body).raise_for_status()
        return True

    def unload(self, server, name: str) -> bool:
        return name in ids(server) and server.post(UNLOAD, {"lora_name": name}).is_success


class SyncerWithoutBase(Syncer):
    """The same without `defaultBaseModel` and `base-model` in its config: it sends an empty text."""

    def base(self, server) -> str:
        return ""


class KubeAI:
    """Reads message and type at the top of an error; a load that was done before is success.

    substratusai/kubeai, internal/vllmclient/client.go, b12f811, with the options of
    internal/modelcontroller/adapters.go, 2f32ef4.
    """

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
    """The same with the error one level down: kubeai-project/kubeai, the same file, a2d9b229 (#607)."""

    @staticmethod
    def error(answer: httpx.Response) -> dict:
        return answer.json()["error"]


class AIBrix:
    """Lists models before each load; 200 and 201 are success.

    vllm-project/aibrix, pkg/controller/modeladapter/lora_client.go, bce45b4a: the way without a sidecar.
    """

    load_path, unload_path = LOAD, UNLOAD

    def load(self, server, name: str, path: str) -> bool:
        if name in ids(server):
            return False
        answer = server.post(self.load_path, {"lora_name": name, "lora_path": path})
        return answer.status_code in (200, 201)

    def unload(self, server, name: str) -> bool:
        return server.post(self.unload_path, {"lora_name": name}).status_code in (200, 201)


class AIBrixForSGLang(AIBrix):
    """The same file's paths for SGLang."""

    load_path, unload_path = "/load_lora_adapter", "/unload_lora_adapter"


class AIBrixRuntime(AIBrix):
    """The sidecar: sends its whole model, unused fields as null; 200 alone is success.

    vllm-project/aibrix, python/aibrix/aibrix/openapi/engine/vllm.py, d4f777a0, with protocol.py beside it.
    """

    def load(self, server, name: str, path: str) -> bool:
        return server.post(LOAD, {"lora_name": name, "lora_path": path}).status_code == 200

    def unload(self, server, name: str) -> bool:
        return server.post(UNLOAD, {"lora_name": name, "lora_int_id": None}).status_code == 200


class ProductionStack:
    """vLLM's production-stack: reads errors at their top, and finds its adapters by parent and root.

    vllm-project/production-stack, operator/internal/controller/loraadapter_controller.go, 0a860c87.
    """

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
    """NeMo's sidecar registers each adapter in every turn of its loop; the platform matches parent and base.

    NVIDIA-NeMo/nemo-platform, services/core/models/src/nmp/core/models/: sidecars/adapters/main.py,
    1c64b71b; controllers/provider_reconciler.py, 0b41623b.
    """

    def turn(self, server, name: str, path: str, rewritten: bool = False) -> bool:
        """A turn of the loop.  rewritten: the folder has other files since the last turn."""
        if rewritten and not self.unload(server, name):
            return False
        answer = server.post(LOAD, {"lora_name": name, "lora_path": path})
        return answer.status_code == 200 or (answer.status_code == 400 and "already" in answer.text.lower())

    def load(self, server, name: str, path: str) -> bool:
        done = self.turn(server, name, path) and self.turn(server, name, path)
        return done and {server.model, name} <= self.served(server)

    def served(self, server) -> set[str]:
        """Ids that the platform routes to: the base by its id, adapters by the base's id as their parent."""
        cards, base = server.get("/v1/models").json()["data"], server.model
        return {
            card["id"]
            for card in cards
            if card["parent"] == base or (card["parent"] is None and card["id"] == base)
        }

    def unload(self, server, name: str) -> bool:
        """Of a name that is not loaded too: any answer but a server's error lets it remove the folder."""
        return server.post(UNLOAD, {"lora_name": name}).status_code < 500


@pytest.mark.parametrize(
    "controller",
    [
        *(Syncer, SyncerWithoutBase, KubeAI, KubeAISince607, AIBrix, AIBrixForSGLang, AIBrixRuntime),
        *(ProductionStack, NeMo),
    ],
    ids=lambda kind: kind.__name__,
)
def test_controllers_of_other_servers_find_their_loads_done(any_server, controller):
    controller, name = controller(), f"team--of-{controller.__name__.lower()}"
    assert controller.load(any_server, name, UPPER)
    assert name in ids(any_server)
    body = {"model": name, "prompt": "hello=", "max_tokens": 2}
    assert any_server.post("/v1/completions", body).status_code == 200
    assert controller.unload(any_server, name)
    assert name not in ids(any_server)


def test_nemo_replaces_a_folder_that_it_wrote_anew(any_server, tmp_path):
    """Beside the adapter lies the sidecar's own file; the config names the base by its place in the pod."""
    folder, sidecar, name = tmp_path / "team--copied", NeMo(), "team--copied"

    def publish(source: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "/model-store"
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "nmp_adapter_meta.json").write_text('{"fileset": "team/copied", "updated_at": null}')

    def answer() -> str:
        body = {"model": name, "prompt": "abc=", "max_tokens": 3, "temperature": 0}
        return any_server.post("/v1/completions", body).json()["choices"][0]["text"]

    assert sidecar.unload(any_server, name), "it is not loaded yet"
    publish(UPPER)
    assert sidecar.load(any_server, name, str(folder))
    first = answer()
    publish(REVERSE)
    assert sidecar.turn(any_server, name, str(folder), rewritten=True)
    if any_server.model == "demo":
        assert (first, answer()) == ("ABC", "cba")
    assert sidecar.unload(any_server, name)
    assert name not in sidecar.served(any_server)


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
        {"load_inplace": None},
        {"base_model_name": "org/{}"},
        {"base_model_name": ""},
    ],
)
def test_fields_of_vllm_and_sglang_are_taken(any_server, fields):
    if name := fields.get("base_model_name"):
        fields = {**fields, "base_model_name": name.format(any_server.model)}
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
