# SPDX-License-Identifier: Apache-2.0
"""The only engine of a server, when it does not get on."""

from __future__ import annotations

import os
import signal

import httpx

from tests.stopped_processes import stop

from .demo_server import demo_server
from .instance_parts import until


def test_engine_that_is_stopped_is_unhealthy_and_said_once_and_healthy_when_it_gets_on(tmp_path):
    with demo_server(tmp_path / "log", "--eager", "--set", "front_end.heartbeat_timeout_s=5") as server:

        def health() -> int:
            return httpx.get(f"{server.url}/health", trust_env=False).status_code

        assert health() == 200
        stop(server.engine_pid())
        try:
            until(lambda: health() == 503)
            until(lambda: "instance-0 is silent" in server.log.read_text())
        finally:
            os.kill(server.engine_pid(), signal.SIGCONT)
        until(lambda: health() == 200)
        assert server.log.read_text().count("instance-0 is silent") == 1
        until(lambda: "instance-0 gets on again" in server.log.read_text())
