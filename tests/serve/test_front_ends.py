"""`moe-lora serve --front-ends 2`: one port, several processes behind it, and nothing left of them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest

from demo.tasks import prompt_for
from tests.dist.cluster_jobs import alive, until
from tests.serve.demo_server import DEMO, DemoServer, demo_server

OPTIONS = ("--lora-dir", str(DEMO / "adapters"), "--eager", "--dtype", "float32")
SEVERAL = ("--front-ends", "2", "--instances", "2", "--placement", "loraserve")


@pytest.fixture
def server(tmp_path) -> Iterator[DemoServer]:
    with demo_server(tmp_path / "log", *OPTIONS, *SEVERAL) as server:
        said = r"instance instance-\d dialled in"
        until(lambda: len(re.findall(said, server.log.read_text())) == 6, server.log.read_text)
        yield server


def pids(server: DemoServer) -> dict[str, int]:
    """Of the latest process of each role."""
    found = re.findall(r"(\S+) started \(process (\d+)\)", server.log.read_text())
    return {name: int(pid) for name, pid in found}


def complete(server: DemoServer, model: str = "upper") -> str:
    """Over a connection of its own, which either front end may take."""
    body = {"model": model, "prompt": prompt_for("abc"), "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_one_port_outlives_a_front_end_and_all_end_together(server):
    first = pids(server)
    assert sorted(first) == ["controller", "front-end-0", "front-end-1", "instance-0", "instance-1"]
    text = complete(server)
    body = {"lora_name": "new", "lora_path": str(DEMO / "adapters" / "upper")}
    loaded = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60, trust_env=False)
    assert loaded.status_code == 200, loaded.text
    assert [complete(server, "new") for _ in range(8)] == [text] * 8
    os.kill(first["front-end-0"], signal.SIGKILL)
    until(lambda: pids(server)["front-end-0"] != first["front-end-0"], server.log.read_text)
    assert [complete(server, "new") for _ in range(8)] == [text] * 8
    everyone = pids(server).values()
    assert server.stop() == 0
    assert not any(map(alive, everyone))


def test_killed_outright_it_leaves_no_process(server):
    everyone = pids(server).values()
    server.process.kill()
    server.process.wait()
    until(lambda: not any(map(alive, everyone)), lambda: "roles outlive what started them")
