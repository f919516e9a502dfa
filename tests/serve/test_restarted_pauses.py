# SPDX-License-Identifier: Apache-2.0
"""A pause outlives a killed controller, and holds at an instance that starts after that."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

from .demo_server import DemoServer, demo_server
from .live_server import wait_until
from .test_controls import NUM, OPTIONS, SEVERAL, Http, several


def controllers(server: DemoServer) -> list[int]:
    """Process ids, the oldest first."""
    return [int(pid) for pid in re.findall(r"controller started \(process (\d+)\)", server.log.read_text())]


@pytest.mark.slow
def test_a_restarted_controller_keeps_the_pause(tmp_path: Path) -> None:
    with demo_server(tmp_path / "log", *OPTIONS, *SEVERAL) as server:
        server.wait_for_instances()
        http = Http(server.url)
        http.ok("POST", "/pause?mode=keep")
        os.kill(controllers(server)[0], signal.SIGKILL)
        wait_until(lambda: len(controllers(server)) == 2, "the next controller starts")
        server.wait_for_instances(8)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.wait_for_instances(11)
        assert [http.ok("GET", "/is_paused") for _ in range(4)] == [{"is_paused": True}] * 4
        with several(http, "upper") as answers:
            wait_until(
                lambda: http.num_waiting() == NUM or any(one.done() for one in answers), "all requests wait"
            )
            is_early = any(answer.done() for answer in answers)
            assert http.ok("POST", "/resume") == {"status": "resumed"}
            assert all(answer.result(PATIENCE_S)["text"] for answer in answers)
        assert not is_early
        assert http.ok("GET", "/is_paused") == {"is_paused": False}
