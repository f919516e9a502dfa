"""The engine's process ends with its client, however early the client leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from moe_lora.config import EngineConfig
from moe_lora.engine.process import StartEngine

MODEL = Path(__file__).parents[2] / "demo" / "model"


def test_client_that_leaves_while_the_engine_is_built_ends_it_at_once():
    ours, theirs = socket.socketpair()
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "moe_lora.engine.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
    with Connection(ours.detach()) as connection:
        connection.send(StartEngine(EngineConfig(model_dir=str(MODEL), num_threads=1), heartbeat_s=1.0))
    try:
        _, log = worker.communicate(timeout=120)
    finally:
        worker.kill()
    assert worker.returncode == 0
    assert "engine ready" not in log
