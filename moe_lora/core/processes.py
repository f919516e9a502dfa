# SPDX-License-Identifier: Apache-2.0
"""This host's processes.  Torch-free."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from .host import processor_limit

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
_SPIN_COUNT = "10000"
"""For libgomp; a spin takes 5 to 20 ns."""


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Work in a short thread: a lasting thread would keep OpenMP's workers from the steps."""
    thread = ThreadPoolExecutor(1, "short")
    done = thread.submit(work)
    thread.shutdown(wait=False)
    return done


def usable_core_numbers() -> list[int]:
    """Cores of this thread, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def allowed_core_numbers() -> list[int]:
    """Cores available to child processes, also outside this process's `taskset` mask."""
    if not hasattr(os, "sched_setaffinity"):
        return usable_core_numbers()

    def widen() -> list[int]:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        return usable_core_numbers()

    return in_thread(widen).result()


def usable_cores() -> int:
    """Number of this process's cores, at most the processors of its container, rounded up."""
    num_cores, limit = len(usable_core_numbers()), processor_limit()
    return num_cores if limit is None else min(num_cores, math.ceil(limit))


def worker_environment(num_threads: int | None) -> dict[str, str]:
    """Environment of an engine process: its share of cores, set before the import of torch.

    Idle OpenMP threads spin for about 0.1 ms, longer than the gaps within a step, then sleep.
    """
    threads = str(num_threads or usable_cores())
    return {
        **_without_job(),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SPIN_COUNT),
    }


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Deaths within `quick_s` of the start are quick; several in a row delay the next start."""

    quick_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 5.0

    def num_deaths(self, before: int, lived_s: float) -> int:
        """Quick deaths in a row after one more death."""
        return before + 1 if lived_s < self.quick_s else 1

    def pause_s(self, num_deaths: int) -> float:
        """Seconds before the next start; 0 after the first quick death."""
        if num_deaths <= 1:
            return 0.0
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(num_deaths - 2, 60))


_OF_JOB = re.compile("((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


def _without_job() -> dict[str, str]:
    """This environment, without a place in a job of the caller's shell."""
    return {name: value for name, value in os.environ.items() if not _OF_JOB.fullmatch(name)}


class Child:
    """A child process in its own session: Ctrl-C in the terminal reaches only the keeper.

    words, options: command, around the number of the child's end of `socket`.  ended: exit code, negative for
    a signal.  Raises OSError or RuntimeError.
    """

    def __init__(
        self,
        *words: str,
        options: Sequence[str] = (),
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.ended: Future[int] = Future()
        self.ended.set_running_or_notify_cancel()
        with ExitStack() as undo:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            self.process = subprocess.Popen(
                [sys.executable, *words, str(theirs.fileno()), *options],
                pass_fds=[*fds, theirs.fileno()],
                env={**_without_job(), **(environment or {})},
                start_new_session=True,
            )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            threading.Thread(target=self._wait, name=f"child-{self.pid}", daemon=True).start()
            undo.pop_all()
            theirs.close()
        self.socket = ours

    def _wait(self) -> None:
        self.ended.set_result(self.process.wait())

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped, as by SIGSTOP."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False

    @property
    def cpu_ticks(self) -> int:
        """CPU time in clock ticks; 0 if unknown."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return 0
        return sum(map(int, stat.rpartition(") ")[2].split()[11:13]))  # behind the name: any text

    @property
    def how_ended(self) -> str:
        """Exit code or signal in words."""
        code = self.ended.result()
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def end(self, limit_s: float) -> None:
        """As `end_children`."""
        end_children([self], limit_s)


def end_children(children: Sequence[Child], limit_s: float) -> None:
    """Wait for processes to end; kill the rest after limit_s."""
    wait([child.ended for child in children], limit_s)
    for child in children:
        child.process.kill()
    wait([child.ended for child in children])


def start_child(module: str, *, num_threads: int | None) -> tuple[Child, Connection]:
    """Run `python -m module FD`, whose main is `teardown.run_child`."""
    child = Child("-m", module, environment=worker_environment(num_threads))
    return child, Connection(child.socket.detach())


LOWEST = 19
"""Nice value of the lowest priority."""


def set_priority(pid: int, added: int) -> None:
    """Set a child session's nice value: this process's and `added`.

    No effect without the right to lower the value again, and between autogroups of the kernel.
    """
    if _may_lower():
        nice = min(LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + added)
        with suppress(OSError):
            os.setpriority(os.PRIO_PGRP, pid, nice)


@functools.cache
def _may_lower() -> bool:
    def lower() -> None:
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        for nice in (LOWEST, before):
            os.setpriority(os.PRIO_PROCESS, thread, nice)

    try:
        in_thread(lower).result()
    except OSError:
        return False
    return True


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
