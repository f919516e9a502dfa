# SPDX-License-Identifier: Apache-2.0
"""A running server finds unknown adapters at their first request (`--lora-resolver`)."""

from __future__ import annotations

import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.tasks import prompt_for
from tests.dist.cluster_jobs import until

from .demo_server import DEMO, DemoServer, demo_server
from .served_tenants import new_key

OPTIONS = ("--eager", "--dtype", "float32")
SEVERAL = ("--front-ends", "2", "--instances", "2")
MOST = 5


def resolver(folder: Path) -> tuple[str, ...]:
    return *OPTIONS, "--lora-resolver", str(folder), "--set", f"sources.max_resolved={MOST}"


def ask(server: DemoServer, model: str, key: str = "", **fields: Any) -> tuple[int, str]:
    """Status, and text or error."""
    body = {"model": model, "prompt": prompt_for("abc"), "max_tokens": 4, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, trust_env=False)
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.is_success else answer.text


def served(server: DemoServer) -> list[str]:
    cards = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    return [card["id"] for card in cards if card["id"] != "demo"]


def test_names_load_once_and_idle_ones_leave(tmp_path: Path) -> None:
    with demo_server(tmp_path / "log", *resolver(DEMO / "adapters")) as server:
        assert served(server) == []
        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(lambda _: ask(server, "upper"), range(16))) == {(200, "ABC")}
        loads = r"adapter upper version \d"
        assert len(re.findall(loads, server.log.read_text())) == 1
        for name in ("nobody", "../adapters/upper", "upper/", "index.json"):
            assert ask(server, name)[0] == 404
        assert ask(server, "demo:lower") == (200, "abc")
        names = sorted(path.name for path in (DEMO / "adapters").iterdir() if path.is_dir())[:8]
        with ThreadPoolExecutor(4) as pool:
            first = list(pool.map(lambda name: ask(server, name), names))
            again = list(pool.map(lambda name: ask(server, name), names))
        assert {status for status, _ in first} == {200}
        assert again == first
        for name in names[:MOST]:
            ask(server, name)
        assert len(served(server)) <= MOST


def test_a_weighted_sum_finds_its_terms(tmp_path: Path) -> None:
    with demo_server(tmp_path / "log", *resolver(DEMO / "adapters")) as server:
        terms = [{"name": "upper", "weight": 1.0}, {"name": "rot13", "weight": 0.0}]
        assert ask(server, "demo", lora=terms) == (200, "ABC")
        assert {"upper", "rot13"} < set(served(server))
        status, text = ask(server, "demo", lora=[*terms, {"name": "nobody"}])
        assert status == 404
        assert "'nobody'" in text


def test_a_broken_adapter_fails_alone(tmp_path: Path) -> None:
    folder = tmp_path / "names"
    for name in ("upper", "broken"):
        shutil.copytree(DEMO / "adapters" / "upper", folder / name)
    (folder / "broken" / "adapter_model.safetensors").write_bytes(b"\x08")
    with demo_server(tmp_path / "log", *resolver(folder)) as server:
        for _ in range(2):
            status, text = ask(server, "broken")
            assert status == 400
            assert "adapter_model.safetensors" in text
        assert ask(server, "upper") == (200, "ABC")
        assert served(server) == ["upper"]


def test_a_key_without_the_right_probes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = new_key(file, "acme", "--adapters", "upper")
    options = (*resolver(DEMO / "adapters"), "--api-keys", str(file))
    with demo_server(tmp_path / "log", *options) as server:
        assert ask(server, "lower", key)[0] == 404
        assert ask(server, "upper", key) == (200, "ABC")
        assert "adapter lower version" not in server.log.read_text()


@pytest.mark.slow
def test_names_outlive_killed_processes(tmp_path: Path) -> None:
    with demo_server(tmp_path / "log", *resolver(DEMO / "adapters"), *SEVERAL) as server:
        server.wait_for_instances()
        text = {name: ask(server, name) for name in ("upper", "lower", "reverse")}
        assert {status for status, _ in text.values()} == {200}
        pids = dict(re.findall(r"(\S+) started \(process (\d+)\)", server.log.read_text()))
        for role in ("instance-0", "front-end-0", "controller"):
            os.kill(int(pids[role]), signal.SIGKILL)
        until(lambda: server.log.read_text().count("started (process") >= 8, server.log.read_text)

        def answers(name: str) -> bool:
            try:
                return ask(server, name)[0] == 200
            except httpx.HTTPError:
                return False

        for name in ("rot13", *text, "leet"):
            until(lambda name=name: answers(name), server.log.read_text)
        for name, before in text.items():
            assert ask(server, name) == before
