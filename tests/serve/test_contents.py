# SPDX-License-Identifier: Apache-2.0
"""Several instances serve one content under a name, whatever becomes of the folder that it came from."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from demo.tasks import prompt_for

from .demo_server import DEMO, DemoServer, demo_server
from .instance_parts import instance_values, until, until_both_up

ADAPTERS = DEMO / "adapters"
NAMES = list(json.loads((ADAPTERS / "index.json").read_text()))
OPTIONS = ("--eager", "--instances", "2", "--dtype", "float32", "--routing", "round_robin")
KINDS = [
    pytest.param((), id="instances"),
    pytest.param(("--lora-server", "EP1-PP1"), id="LoRA Server", marks=pytest.mark.slow),
    pytest.param(("--set", "pool.replicas=1"), id="pool", marks=pytest.mark.slow),
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of an adapter that is loaded from the start as `start`."""
    return shutil.copytree(ADAPTERS / NAMES[0], tmp_path / "start")


@pytest.fixture(params=KINDS)
def pair(request, tmp_path, folder) -> Iterator[DemoServer]:
    modules = (f"start={folder}", f"other={ADAPTERS / NAMES[1]}")
    state = ("--set", f"engine.state_dir={tmp_path / 'state'}")
    with demo_server(
        tmp_path / "log", *OPTIONS, *state, *request.param, "--lora-modules", *modules
    ) as server:
        until_both_up(server)
        yield server


def answers(server: DemoServer, model: str, count: int = 2) -> list[str]:
    """Greedy answers of one prompt, by turns of the instances."""
    prompt = prompt_for("abcdef")
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    found = []
    for _ in range(count):
        response = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        found.append(choice["text"] + str([round(one, 3) for one in choice["logprobs"]["token_logprobs"]]))
    return found


def load(server: DemoServer, name: str, path: Path, **more: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, trust_env=False)


def residency(server: DemoServer, name: str) -> str:
    cards = httpx.get(f"{server.url}/v1/adapters", trust_env=False).json()["data"]
    return next(card["residency"] for card in cards if card["id"] == name)


def restart(server: DemoServer, number: int = 1) -> None:
    """Kill engines, and wait until all are back."""
    before = server.engine_pids()
    for pid in before[:number]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: instance_values(server, "up") != [1.0, 1.0])
    until_both_up(server)


def overwrite(folder: Path, source: Path) -> None:
    for file in source.iterdir():
        shutil.copy(file, folder / file.name)


def test_engine_that_is_started_again_serves_what_was_loaded_not_what_lies_there_now(pair, folder, tmp_path):
    later = shutil.copytree(ADAPTERS / NAMES[2], tmp_path / "later")
    assert load(pair, "later", later).status_code == 200
    before = {name: answers(pair, name) for name in ("start", "later")}
    assert before["start"][0] == before["start"][1]
    for place in (folder, later):
        overwrite(place, ADAPTERS / NAMES[3])
    restart(pair)
    assert {name: answers(pair, name) for name in before} == before
    assert residency(pair, "start") != "unavailable"


def test_content_that_can_not_be_had_makes_its_adapter_unavailable_and_no_other(pair, folder, tmp_path):
    before = answers(pair, "other")
    (folder / "adapter_model.safetensors").write_bytes(b"cut short")
    for kept in (tmp_path / "state").rglob("*.safetensors"):
        kept.unlink()
    restart(pair, number=2)
    body = {"model": "start", "prompt": "a", "max_tokens": 1}
    response = httpx.post(f"{pair.url}/v1/completions", json=body, trust_env=False)
    assert response.status_code == 503
    assert "'start' is unavailable" in response.json()["error"]["message"]
    assert residency(pair, "start") == "unavailable"
    assert answers(pair, "other") == before
    assert load(pair, "start", ADAPTERS / NAMES[0], load_inplace=True).status_code == 200
    first, second = answers(pair, "start")
    assert first == second


@pytest.mark.slow
def test_instances_serve_the_same_however_the_folder_is_switched_during_loads(pair, tmp_path):
    link, over = tmp_path / "link", threading.Event()
    link.symlink_to(ADAPTERS / NAMES[2])

    def switch() -> None:
        for name in itertools.cycle(NAMES[3:1:-1]):
            fresh = tmp_path / "fresh"
            fresh.symlink_to(ADAPTERS / name)
            os.replace(fresh, link)
            if over.wait(0.002):
                return

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        for _ in range(6):
            response = load(pair, "switched", link, load_inplace=True)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 200:
                first, second = answers(pair, "switched")
                assert first == second
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [pytest.param(("--lora-server", "EP2-PP1"), id="LoRA Server")], indirect=True
)
def test_store_of_the_lora_server_that_is_removed_is_made_again_and_no_engine_ends(pair, tmp_path):
    before, pids = answers(pair, "start"), pair.engine_pids()
    for store in (tmp_path / "state").glob("run-*/adapters"):
        shutil.rmtree(store)
    assert answers(pair, "start") == before
    assert len(set(answers(pair, "other"))) == 1, "it was not resident before"
    assert load(pair, "later", ADAPTERS / NAMES[2]).status_code == 200
    assert len(set(answers(pair, "later"))) == 1
    restart(pair)
    assert answers(pair, "start") == before
    assert pair.engine_pids()[0] in pids
