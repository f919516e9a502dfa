# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading adapters over HTTP."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest

from moe_lora.core.errors import BusyError
from moe_lora.serve.admin import adapter_routes
from moe_lora.serve.server import create_app
from tests.patience import PATIENCE_S

from .conftest import as_served, frontend_of
from .live_server import ServerThread

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NOBODY = 65534


@pytest.fixture
def adapter_dir(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == status
    return response.json()["error"]["message"]


def names(server):
    return [card["id"] for card in server.get("/v1/models").json()["data"]]


def test_load_use_and_unload(server, adapter_dir):
    response = server.post(LOAD, {"lora_name": "new", "lora_path": adapter_dir})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert (cards["new"]["parent"], cards["new"]["root"]) == ("base", adapter_dir)
    assert server.post("/v1/completions", {"prompt": "hello", "model": "new"}).status_code == 200
    response = server.post(UNLOAD, {"lora_name": "new"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert names(server) == ["base", "shout"]
    assert server.post("/v1/completions", {"prompt": "hello", "model": "new"}).status_code == 404


def test_a_folder_of_adapters_that_peft_saved_by_name_is_looked_into(server, adapter_dir, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    shutil.copytree(adapter_dir, folder / "first")
    assert server.post(LOAD, {"lora_name": "new", "lora_path": str(folder)}).status_code == 200
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["new"]["root"] == str(folder / "first")
    shutil.copytree(adapter_dir, folder / "second")
    message = error_of(server.post(LOAD, {"lora_name": "third", "lora_path": str(folder)}), 400)
    assert "2 adapters (first, second) and none called 'third'" in message
    assert server.post(LOAD, {"lora_name": "second", "lora_path": str(folder)}).status_code == 200
    for name in ("new", "second"):
        assert server.post(UNLOAD, {"lora_name": name}).status_code == 200


def test_a_folder_that_hangs_holds_nobody_up(server, adapter_dir, monkeypatch):
    looking, goes_on = threading.Event(), threading.Event()

    def hangs(path, name):
        looking.set()
        assert goes_on.wait(PATIENCE_S)
        return path

    monkeypatch.setattr(adapter_routes, "adapter_folder", hangs)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(server.post, LOAD, {"lora_name": "new", "lora_path": adapter_dir})
        assert looking.wait(PATIENCE_S)
        assert names(server) == ["base", "shout"]
        goes_on.set()
        assert load.result().status_code == 200
    assert server.post(UNLOAD, {"lora_name": "new"}).status_code == 200


def test_a_name_taken_is_400_unless_loaded_in_place(server, engine, adapter_dir):
    body = {"lora_name": "shout", "lora_path": adapter_dir}
    assert "already" in error_of(server.post(LOAD, body), 400)
    assert engine.adapters["shout"].version == 1
    assert server.post(LOAD, {**body, "load_inplace": True}).status_code == 200
    assert engine.adapters["shout"].version == 2


def test_the_base_models_name_is_taken(server, adapter_dir):
    body = {"lora_name": "base", "lora_path": adapter_dir, "load_inplace": True}
    assert "base model" in error_of(server.post(LOAD, body), 400)


@pytest.mark.parametrize(
    "body",
    [
        {"lora_name": "", "lora_path": "x"},
        {"lora_name": "x", "lora_path": ""},
        {"lora_name": "x"},
        {"lora_path": "x"},
        {},
        {"lora_name": "a,b", "lora_path": "x"},
        {"lora_name": "a\n", "lora_path": "x"},
        {"lora_name": "a" * 300, "lora_path": "x"},
        {"lora_name": "composed:x", "lora_path": "x"},
        {"lora_name": 5, "lora_path": "x"},
        {"lora_name": "x", "lora_path": "x", "load_inplace": "yes"},
        {"lora_name": "x", "lora_path": "x", "load_inplce": True},
        {"lora_name": "x", "lora_path": "x", "pinned": "yes"},
        {"lora_name": "x", "lora_path": "x", "is_3d_lora_weight": 1},
        {"lora_name": "x", "lora_path": "x", "base_model_name": 5},
    ],
)
def test_bad_fields_are_400(server, body):
    error_of(server.post(LOAD, body), 400)


@pytest.mark.parametrize("path", ["no/such/dir", "a\0b", "x" * 5000, "/"])
def test_missing_files_are_404(server, path):
    assert "adapter" in error_of(server.post(LOAD, {"lora_name": "new", "lora_path": path}), 404)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o333])
def test_a_folder_that_the_servers_user_may_not_read_is_400(server, mode):
    with TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent, "adapter")
        folder.mkdir()
        if is_root := os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            folder.chmod(mode)
            message = error_of(server.post(LOAD, {"lora_name": "new", "lora_path": str(folder)}), 400)
        finally:
            folder.chmod(0o755)
            if is_root:
                os.seteuid(0)
    assert "can't be read (Permission denied); let the server's user read the folder" in message


def test_an_invalid_adapter_is_400_with_the_reason(server, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    message = error_of(server.post(LOAD, {"lora_name": "new", "lora_path": str(folder)}), 400)
    assert "key 'x'" in message
    assert names(server) == ["base", "shout"]


def test_outside_of_the_root_no_path_tells_what_lies_there(engine, tokenizer, adapter_dir, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(adapter_dir, root / "own")
    (root / "link").symlink_to(adapter_dir)
    frontend = frontend_of(engine, tokenizer)
    settings = replace(frontend.cluster.engine, adapter_root=str(root))
    frontend.cluster = replace(frontend.cluster, engine=settings)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as server:
        for path in (adapter_dir, f"{root}/link", f"{root}/../adapter", f"{root}/../nothing", "/etc", "\0"):
            message = error_of(server.post(LOAD, {"lora_name": "new", "lora_path": path}), 404)
            assert message == f"no LoRA adapter found: {path!r} is not in the server's adapter_root"
        assert server.post(LOAD, {"lora_name": "new", "lora_path": f"{root}/own"}).status_code == 200


def test_unloading_what_is_not_there_is_404(server):
    assert "nobody" in error_of(server.post(UNLOAD, {"lora_name": "nobody"}), 404)
    error_of(server.post(UNLOAD, {"lora_name": "base"}), 404)
    error_of(server.post(UNLOAD, {"lora_name": ""}), 400)
    error_of(server.post(UNLOAD, {"lora_name": "composed:x"}), 404)  # a sum may be unloaded


def test_adapters_are_listed_with_what_they_take_and_pinned_by_name(server, engine):
    [card] = server.get("/v1/adapters").json()["data"]
    assert (card["id"], card["residency"], card["pages"], card["pinned"]) == ("shout", "host", 0, False)
    assert card["idle_s"] is None
    pinned = server.post("/v1/adapters/shout/pin", {}).json()
    assert (pinned["pinned"], pinned["residency"], pinned["pages"], pinned["idle_s"]) == (
        True,
        "device",
        7,
        0.25,
    )
    assert server.get("/v1/adapters").json()["data"] == [pinned]
    assert server.post("/v1/adapters/shout/unpin", {}).json()["pinned"] is False


def test_pins_that_leave_no_room_and_unknown_names_are_refused(server, adapter_dir):
    assert "not loaded" in error_of(server.post("/v1/adapters/nobody/pin", {}), 404)
    assert server.post(LOAD, {"lora_name": "a/b", "lora_path": adapter_dir}).status_code == 200
    assert server.post("/v1/adapters/a/b/pin", {}).status_code == 200
    assert "raise arena_mb" in error_of(server.post("/v1/adapters/shout/pin", {}), 400)


def test_a_pin_that_must_wait_is_503_and_loads_nothing(server, engine, adapter_dir, monkeypatch):
    monkeypatch.setattr(engine, "_pin_adapter", Mock(side_effect=BusyError("a former version has the slot")))
    response = server.post(LOAD, {"lora_name": "new", "lora_path": adapter_dir, "pinned": True})
    assert "former version" in error_of(response, 503)
    assert response.headers["retry-after"] == "5"
    assert "new" not in names(server)


def test_files_of_a_limited_number_of_names_are_known(engine, tokenizer, adapter_dir, monkeypatch):
    """Names that another front end unloads are not forgotten by name."""
    monkeypatch.setattr(adapter_routes, "MAX_KNOWN_LOADS", 3)
    loads = adapter_routes.AdapterLoads(frontend_of(engine, tokenizer))

    async def run() -> None:
        for name in ("a", "b", "c", "a", "d"):
            body = adapter_routes.LoadAdapterRequest(lora_name=name, lora_path=adapter_dir)
            await loads.load(body, in_place=True)

    asyncio.run(run())
    assert [*loads._loaded] == ["c", "a", "d"]
