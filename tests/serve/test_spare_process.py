# SPDX-License-Identifier: Apache-2.0
"""An instance that is killed comes back as the spare process of its server."""

from __future__ import annotations

import os
import re
import signal

import httpx
import pytest

from .demo_server import DEMO, DemoServer, demo_server
from .live_server import wait_until

WAITS = "a spare process waits"


def answer(server: DemoServer) -> str:
    body = {"model": "upper", "prompt": "hello=", "max_tokens": 6, "temperature": 0}
    said = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)
    return said.json()["choices"][0]["text"]


@pytest.mark.slow
def test_the_spare_process_serves_in_the_place_of_a_killed_instance(tmp_path):
    options = ("--lora-dir", str(DEMO / "adapters"), "--eager", "--instances", "2")
    with demo_server(tmp_path / "log", *options, anew=True) as server:
        before = answer(server)
        wait_until(lambda: WAITS in server.log.read_text(), "a spare process waits")
        num_dialled = server.log.read_text().count("dialled in")
        for killed in server.engine_pids():
            os.kill(killed, signal.SIGKILL)
        wait_until(
            lambda: server.log.read_text().count("dialled in") >= num_dialled + 2, "both instances are back"
        )
        assert answer(server) == before
        log = server.log.read_text()
        started = re.findall(r"started \(process (\d+)\)", log)
        assert re.findall(rf"{WAITS} .*\(process (\d+)\)", log)[0] in started
