# SPDX-License-Identifier: Apache-2.0
"""Cores, environment and start of compute processes.  Imports no torch."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

STOP_TIMEOUT_S = 10.0
_SPIN_COUNT = "10000"
"""For libgomp; a spin takes 5 to 20 ns."""


def usable_core_numbers() -> list[int]:
    """Cores of this thread, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def allowed_core_numbers() -> list[int]:
    """Cores available to child processes, ascending.

    Includes cores outside this process's `taskset` mask; a cpuset limits both.
    """
    if not hasattr(os, "sched_setaffinity"):
        return usable_core_numbers()

    def widen() -> list[int]:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        return usable_core_numbers()

    with ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(widen).result()


def usable_cores() -> int:
    """Number of this process's cores."""
    return len(usable_core_numbers())


def worker_environment(num_threads: int | None) -> dict[str, str]:
    """Environment of an engine process: its share of cores, set before the import of torch.

    Idle OpenMP threads spin for about 0.1 ms, longer than the gaps within a step, and then sleep: front end
    and load share the cores.
    """
    threads = str(num_threads or usable_cores())
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SPIN_COUNT),
    }


def is_stopped(pid: int) -> bool:
    """True if this child process is stopped, for example by SIGSTOP."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def start_child(
    module: str, *options: str, num_threads: int | None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `python -m module options FD` with FD connected to the returned connection.

    The process has its own session: Ctrl-C in this terminal does not reach it first.
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
    """Return once the process at the other end of this socket has hung up or ended."""
    hang_up = select.poll()
    # poll always reports hang-ups; POLLRDHUP, if present, reports a half-closed peer.
    hang_up.register(fd, getattr(select, "POLLRDHUP", 0))
    hang_up.poll()


def set_log_level(level: str) -> None:
    """Set the level of this package's log."""
    logging.getLogger("moe_lora").setLevel(level.upper())


def has_terminal() -> bool:
    """True if a terminal can end this process by SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
