# SPDX-License-Identifier: Apache-2.0
"""Processes that a test stops: the signal alone returns while they may still run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.patience import PATIENCE_S


def stop(pid: int) -> None:
    """Stop a process, and return when each of its threads stands still.

    On a busy machine that takes a while: the signal is obeyed once the thread that takes it is given a core.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(_state(task) in "TXZ" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline_s, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    """The letter behind the name in parentheses; X of a thread that has ended."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
