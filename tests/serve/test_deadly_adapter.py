# SPDX-License-Identifier: Apache-2.0
"""An adapter whose computing ends the process: two instances, a LoRA Server, three neighbours' clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from .demo_server import DEMO, DemoServer, demo_server

INJECTED = '''
import os

from moe_lora.engine.step.runner import ModelRunner

run = ModelRunner.run


def deadly(self, plan, drawn=None):
    """Abort at a request of the adapter "deadly"."""
    if any(i.sequence.adapter is not None and i.sequence.adapter.name == "deadly" for i in plan):
        os.abort()
    return run(self, plan, drawn)


ModelRunner.run = deadly
'''
NEIGHBOURS = ("upper", "reverse", "double")
OPTIONS = ("--lora-dir", str(DEMO / "adapters"), "--eager", "--instances", "2", "--dtype", "float32")


@pytest.fixture(
    params=[
        pytest.param((), marks=pytest.mark.slow),
        ("--lora-server", "EP1-PP1"),
        pytest.param(("--front-ends", "2"), marks=pytest.mark.slow),
    ],
    ids=["coupled", "lora-server", "front-ends"],
)
def pair(request, tmp_path, monkeypatch) -> Iterator[DemoServer]:
    (tmp_path / "sitecustomize.py").write_text(INJECTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with demo_server(tmp_path / "log", *OPTIONS, *request.param) as server:
        yield server


def ask(server: DemoServer, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello=", "max_tokens": 20, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300, trust_env=False)


def admin(server: DemoServer, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=300, trust_env=False)


class Client(threading.Thread):
    """Asks a model again and again until told to stop."""

    def __init__(self, work: Callable[[], httpx.Response]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.answers: list[tuple[int, str]] = []
        self.over = False
        self.start()

    def run(self) -> None:
        while not self.over:
            answer = self._work()
            said = answer.json()
            text = said["choices"][0]["text"] if answer.status_code == 200 else said["error"]["message"]
            self.answers.append((answer.status_code, text))

    def stop(self) -> list[tuple[int, str]]:
        self.over = True
        self.join()
        return self.answers


def test_only_requests_of_the_deadly_adapter_fail(pair):
    right = {name: ask(pair, name).json()["choices"][0]["text"] for name in NEIGHBOURS}
    path = str(Path(DEMO / "adapters" / "upper"))
    admin(pair, "load_lora_adapter", {"lora_name": "deadly", "lora_path": path}).raise_for_status()
    clients = {name: Client(lambda name=name: ask(pair, name)) for name in NEIGHBOURS}
    time.sleep(1.0)
    answer = ask(pair, "deadly")
    assert answer.status_code == 503
    while "no LLM instance is running" in answer.json()["error"]["message"]:  # of two none is back yet
        time.sleep(0.5)
        answer = ask(pair, "deadly")
        assert answer.status_code == 503
    assert "'deadly' is unavailable: instances" in answer.json()["error"]["message"]
    assert ask(pair, "deadly").status_code == 503, "it ends no third instance"
    time.sleep(1.0)
    for name, client in clients.items():
        found = client.stop()
        assert set(found) == {(200, right[name])}, (name, [one for one in found if one[0] != 200][:2])
    listed = httpx.get(f"{pair.url}/v1/adapters", trust_env=False).json()
    adapters = {one["id"]: one for one in listed["data"]}
    assert adapters["deadly"]["residency"] == "unavailable"
    assert "died" in adapters["deadly"]["problem"]
    assert pair.log.read_text().count("was killed by SIGABRT") == 2
    body = {"lora_name": "deadly", "lora_path": str(DEMO / "adapters" / "reverse"), "load_inplace": True}
    assert admin(pair, "load_lora_adapter", body).status_code == 200
