"""Processes that compute: their share of the cores, and those that follow this one.  Imports no torch."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

STOP_TIMEOUT_S = 10.0


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_environment(num_threads: int | None) -> dict[str, str]:
    """Environment of an engine process: its share of cores, set before torch is imported.

    Idle OpenMP threads sleep instead of spinning, because front end and load share the cores.
    """
    threads = str(num_threads or usable_cores())
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
    }


def start_child(
    module: str, *options: str, num_threads: int | None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `python -m module options FD` as a process that finds us at the other end of FD; our end of it.

    It has a session of its own, so that a Ctrl-C in this one's terminal does not reach it first.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *options, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=worker_environment(num_threads),
            start_new_session=True,
        )
    return process, Connection(ours.detach())


def wait_for_hang_up(fd: int) -> None:
    """Return when the process at the other end of this socket has hung up or ended."""
    hang_up = select.poll()
    # Hang-ups are reported without being asked for; POLLRDHUP, where there is one, tells a half-closed peer.
    hang_up.register(fd, getattr(select, "POLLRDHUP", 0))
    hang_up.poll()
