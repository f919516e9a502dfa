# SPDX-License-Identifier: Apache-2.0
"""An adapter whose computing ends the process: two instances, a LoRA Server, three neighbours' clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .demo_server import DEMO, DemoServer, demo_server, few_adapters
from .instance_parts import until
from .neighbours import NEIGHBOURS, Neighbours, ask

INJECTED = '''
import os

from moe_lora.dist.cluster import suspects
from moe_lora.engine.step.runner import ModelRunner

suspects.ALONE_S = suspects.WAIT_S = 600.0  # the instance that died may take any time to come back
run = ModelRunner.run


def deadly(self, plan, drawn=None):
    """Abort at a request of the adapter "deadly"."""
    if any(i.sequence.adapter is not None and i.sequence.adapter.name == "deadly" for i in plan):
        os.abort()
    return run(self, plan, drawn)


ModelRunner.run = deadly
'''
OPTIONS = (*few_adapters(*NEIGHBOURS), "--eager", "--instances", "2", "--dtype", "float32")


@pytest.fixture(
    params=[
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--lora-server", "EP1-PP1"), marks=pytest.mark.slow),
        pytest.param(("--front-ends", "2"), marks=pytest.mark.slow),
    ],
    ids=["coupled", "lora-server", "front-ends"],
)
def pair(request, tmp_path, monkeypatch) -> Iterator[DemoServer]:
    (tmp_path / "sitecustomize.py").write_text(INJECTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with demo_server(tmp_path / "log", *OPTIONS, *request.param) as server:
        yield server


def admin(server: DemoServer, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, trust_env=False)


def test_only_requests_of_the_deadly_adapter_fail(pair):
    neighbours = Neighbours(pair)
    path = str(Path(DEMO / "adapters" / "upper"))
    admin(pair, "load_lora_adapter", {"lora_name": "deadly", "lora_path": path}).raise_for_status()
    until(lambda: neighbours.num_answers() >= 2)
    answer = ask(pair, "deadly")
    assert answer.status_code == 503
    while "no LLM instance is running" in answer.json()["error"]["message"]:  # of two none is back yet
        time.sleep(0.5)
        answer = ask(pair, "deadly")
        assert answer.status_code == 503
    assert "'deadly' is unavailable: instances" in answer.json()["error"]["message"]
    assert ask(pair, "deadly").status_code == 503, "it ends no third instance"
    num_answers = neighbours.num_answers()
    until(lambda: neighbours.num_answers() >= num_answers + 2)
    neighbours.stop()
    listed = httpx.get(f"{pair.url}/v1/adapters", trust_env=False).json()
    adapters = {one["id"]: one for one in listed["data"]}
    assert adapters["deadly"]["residency"] == "unavailable"
    assert "died" in adapters["deadly"]["problem"]
    assert pair.log.read_text().count("was killed by SIGABRT") == 2
    body = {"lora_name": "deadly", "lora_path": str(DEMO / "adapters" / "reverse"), "load_inplace": True}
    assert admin(pair, "load_lora_adapter", body).status_code == 200
