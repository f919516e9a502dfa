# SPDX-License-Identifier: Apache-2.0
"""Resolvers of a registry and of a hub's organisation, in running servers."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from moe_lora.adapters.registry.base_model import base_model_hash
from moe_lora.adapters.registry.registry import Registry
from tests.dist.cluster_jobs import until
from tests.loopback_hub import Hub, loopback_hub
from tests.patience import PATIENCE_S

from .demo_server import DEMO, DemoServer, demo_server
from .test_controls import Http
from .test_resolver import MOST, OPTIONS, SEVERAL, ask

NAMES = sorted(path.name for path in (DEMO / "adapters").iterdir() if path.is_dir())
LOAD, REGISTERED = "/v1/load_lora_adapter", "/v1/registry/adapters"


@contextmanager
def registry_server(folder: Path, *options: str) -> Iterator[DemoServer]:
    """Finds the demo's adapters in a registry."""
    base_hash = base_model_hash(str(DEMO / "model"))
    with Registry(folder / "registry", create=True) as registry:
        for name in NAMES:
            registry.add(name, DEMO / "adapters" / name, base_hash=base_hash)
    settings = ("--registry", str(folder / "registry"), "--set", "sources.resolver=registry")
    with resolving(folder, *settings, *options) as server:
        yield server


@contextmanager
def hub_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> Iterator[tuple[DemoServer, Hub]]:
    """Finds the demo's adapters as acme's on a hub; names that start with z are not allowed."""
    settings = ("sources.resolver=hf:acme", "sources.allow=hf://acme/[!z]*", f"sources.folder={folder}/cache")
    words = [word for one in settings for word in ("--set", one)]
    with loopback_hub() as hub:
        for name in NAMES:
            place = shutil.copytree(DEMO / "adapters" / name, folder / "hub" / name)
            hub.folders[f"acme/{name}"] = Path(place)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with resolving(folder, *words, *options, anew=True) as server:
            yield server, hub


@contextmanager
def resolving(folder: Path, *options: str, anew: bool = False) -> Iterator[DemoServer]:
    most = f"sources.max_resolved={MOST}"
    with demo_server(folder / "log", *OPTIONS, "--set", most, *options, anew=anew) as server:
        yield server


def paths(server: DemoServer) -> dict[str, str]:
    """Paths of the loaded adapters."""
    cards = Http(server.url).ok("GET", "/v1/adapters")["data"]
    return {card["id"]: card["path"] for card in cards}


def num_loads(server: DemoServer, name: str) -> int:
    return len(re.findall(rf"adapter {name} version \d", server.log.read_text()))


def test_names_of_a_registry(tmp_path: Path) -> None:
    with registry_server(tmp_path) as server:
        http = Http(server.url)
        assert ask(server, "nobody")[0] == 404
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: ask(server, "reverse"), range(8))) == {(200, "cba")}
        assert num_loads(server, "reverse") == 1
        assert "being served" in http("DELETE", f"{REGISTERED}/reverse").text
        http.ok("POST", LOAD, json={"lora_name": "own", "lora_path": str(DEMO / "adapters" / "upper")})
        body = {"lora_name": "reverse", "lora_path": str(DEMO / "adapters" / "upper")}
        assert http.ok("POST", REGISTERED, json=body)["version"] == 2
        assert ask(server, "reverse") == (200, "cba")
        http.ok("POST", LOAD, json={"lora_name": "reverse", "load_inplace": True})
        for name in NAMES[:MOST]:
            assert ask(server, name)[0] == 200
        assert ask(server, "reverse") == (200, "ABC")
        found = paths(server)
        assert {name for name, path in found.items() if not path.endswith("/.")} == {"own", "reverse"}
        assert len(found) <= MOST + 2


@pytest.mark.slow
def test_names_of_an_organisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(tmp_path, monkeypatch) as (server, hub):
        for name, cause in (("nobody", "set HF_TOKEN"), ("zebra", "sources.allow has")):
            status, text = ask(server, name)
            assert status == 404
            assert "hf://" not in text
            assert cause in server.log.read_text()
        hub.answers.clear()
        http, ids = Http(server.url), [1, 40, 41]
        asked = {"input_ids": ids, "lora_path": "upper", "rid": "mine"}
        late = {"model": "upper", "prompt": ids, "timeout": 0.1}
        with ThreadPoolExecutor(2) as pool:
            aborted = pool.submit(http.ok, "POST", "/generate", json=asked)
            until(lambda: "acme/upper" in hub.asked, server.log.read_text)
            assert http("POST", "/v1/completions", json=late).status_code == 408
            http.ok("POST", "/abort_request", json={"rid": "mine"})
            assert aborted.result(PATIENCE_S)["meta_info"]["finish_reason"] == {"type": "abort"}
        hub.answers.set()
        assert ask(server, "upper") == (200, "ABC")
        assert hub.asked.count("acme/upper") == 1
        assert num_loads(server, "upper") == 1
        assert hub.commit("acme/upper") in paths(server)["upper"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["registry", "hub"])
def test_names_outlive_killed_processes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "registry":
        with registry_server(tmp_path, *SEVERAL) as server:
            survive_kills(server)
    else:
        with hub_server(tmp_path, monkeypatch, *SEVERAL) as (server, _):
            survive_kills(server)


def survive_kills(server: DemoServer) -> None:
    own = {"lora_name": "own", "lora_path": str(DEMO / "adapters" / "upper")}
    Http(server.url).ok("POST", LOAD, json=own)
    with ThreadPoolExecutor(4) as pool:
        text = dict(zip(NAMES, pool.map(lambda name: ask(server, name), NAMES), strict=True))
    assert {status for status, _ in text.values()} == {200}

    def is_same(name: str) -> bool:
        try:
            return ask(server, name) == text[name]
        except httpx.HTTPError:
            return False

    for role in ("front-end-0", "instance-0", "controller"):
        pids = re.findall(rf"{role} started \(process (\d+)\)", server.log.read_text())
        os.kill(int(pids[-1]), signal.SIGKILL)
        for name in NAMES:
            until(lambda name=name: is_same(name), server.log.read_text)
        found = paths(server)
        assert not found["own"].endswith("/.")
        assert len(found) <= MOST + 1
