"""Roles as processes of this host: started together, each started again when it ends."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from moe_lora.core.clock import Clock, WallClock
from moe_lora.engine.supervisor import RestartPolicy

logger = logging.getLogger(__name__)

FRONT_END = "front-end"
STOP_S = 20.0
"""From SIGTERM to SIGKILL, beside the time that a front end drains: an instance finishes its step."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A process to keep running.

    kind: roles of one kind stand in for each other.  words: of its command, after the interpreter; fds: that
    it inherits.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    fds: tuple[int, ...] = ()


class HostRoles:
    """Keeps roles running; one thread waits for each.

    over: set when the roles are to be stopped.  failed: whether all of a kind ended too often within a short
    time to be started again.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        over: threading.Event,
        clock: Clock | None = None,
        policy: RestartPolicy | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self.failed = False
        self._drain_s = drain_s
        self.over = over
        self._clock = clock or WallClock()
        self._policy = policy or RestartPolicy()
        self._lock = threading.Lock()
        self._stopping = False
        self._running: dict[str, tuple[Role, subprocess.Popen[bytes]]] = {}
        self._kept = [role.kind for role in roles]
        self._threads = [
            threading.Thread(target=self._keep, args=(role,), name=f"keep-{role.name}", daemon=True)
            for role in roles
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all, those first that others work for; return when they have ended."""
        with self._lock:
            self._stopping = True
            running = list(self._running.values())
        self.over.set()
        _end([process for role, process in running if role.kind == FRONT_END], STOP_S + self._drain_s)
        _end([process for role, process in running if role.kind != FRONT_END], STOP_S)
        for thread in self._threads:
            thread.join()

    def kill(self) -> None:
        """End all at once, while `stop` waits; safe in a signal handler."""
        for _, process in list(self._running.values()):
            process.kill()

    def _keep(self, role: Role) -> None:
        num_deaths = 0
        while (process := self._start(role)) is not None:
            started_s = self._clock.now_s()
            code = process.wait()
            if self._stopping:
                return
            lived_s = self._clock.now_s() - started_s
            num_deaths = num_deaths + 1 if lived_s < self._policy.quick_s else 1
            logger.warning(
                "%s (process %d) ended with exit code %d after %.1f s", role.name, process.pid, code, lived_s
            )
            pause_s = self._policy.pause_s(num_deaths)
            if pause_s is None:
                self._give_up(role, num_deaths)
                return
            self.over.wait(pause_s)

    def _give_up(self, role: Role, num_deaths: int) -> None:
        logger.error(
            "%s ended %d times within %g s of its start and is not started again; find the cause above",
            role.name,
            num_deaths,
            self._policy.quick_s,
        )
        with self._lock:
            self._kept.remove(role.kind)
            if role.kind not in self._kept:
                self.failed = True
                self.over.set()

    def _start(self, role: Role) -> subprocess.Popen[bytes] | None:
        """None: everything is being stopped."""
        with self._lock:
            if self._stopping:
                return None
            # A session of its own: a Ctrl-C in the terminal reaches the process that ends all others.
            process = subprocess.Popen(
                [sys.executable, *role.words], pass_fds=role.fds, start_new_session=True
            )
            self._running[role.name] = role, process
        logger.info("%s started (process %d)", role.name, process.pid)
        return process


def _end(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            logger.warning("process %d does not end and is killed", process.pid)
            process.kill()
            process.wait()


def run_roles(roles: Sequence[Role], drain_s: float = 0.0) -> bool:
    """Keep the roles running until SIGINT or SIGTERM; whether all did their part up to then.

    drain_s: how long a front end may take to end.  A second signal ends all at once.
    """
    over = threading.Event()
    kept: HostRoles | None = None
    signalled = False

    def end(*_: object) -> None:
        nonlocal signalled
        if signalled and kept is not None:
            kept.kill()
        signalled = True
        over.set()

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    kept = HostRoles(roles, over, drain_s=drain_s)
    try:
        over.wait()
    finally:
        kept.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    return not kept.failed


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
