"""An engine in a process of its own, reached through a socket pair.  Imports no torch."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from moe_lora.config import EngineConfig
from moe_lora.core.errors import EngineDeadError

from .attendance import LoneAttendance
from .connection_client import ConnectionClient
from .messages import Reply, Stop

START_CALL_ID = 0
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


@dataclass(frozen=True)
class StartEngine:
    """First message to an engine's process.  heartbeat_s: how often it sends a beat."""

    config: EngineConfig
    heartbeat_s: float


class ProcessClient(ConnectionClient):
    """`EngineClient` of an engine process that it starts, and that ends with it.

    Raises, from the constructor, what kept the engine from starting; with wait=False, `await_start` must be
    called before anything else, and raises it.  attendance: what watches over an engine for which nothing
    stands in; None: a roster's does.
    """

    attendance: LoneAttendance | None = None

    def __init__(self, config: EngineConfig, *, wait: bool = True, heartbeat_s: float = 1.0) -> None:
        self._process, connection = start_child(
            "moe_lora.engine.worker", num_threads=config.threads_per_process
        )
        super().__init__(connection, "the engine's process")
        self._connection.send(StartEngine(config, heartbeat_s))
        if wait:
            self.await_start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the process; negative: the signal that ended it.  None while it runs."""
        return self._process.poll()

    def await_start(self) -> None:
        """Return once the engine takes requests.  Raises what kept it from starting."""
        try:
            started: Reply = self._connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            raise EngineDeadError(
                f"the engine's process ended with exit code {code} while starting"
            ) from error
        except BaseException:
            self._process.terminate()
            raise
        if started.error is not None:
            self._process.wait()
            raise started.error
        self.start_reading()

    def kill(self) -> None:
        """End a process that does nothing any more, be it stopped or stuck."""
        self._process.kill()

    def shut_down(self) -> None:
        """Ask the process to end, then end it; one that is still starting is ended at once."""
        self._stopping = True
        if self._reader is None:
            self._process.kill()
        elif self._process.poll() is None:
            try:
                self._send_command(Stop())
                self._process.wait(STOP_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        if self._reader is not None:
            self._reader.join(STOP_TIMEOUT_S)
            self._connection.close()

    async def is_alive(self) -> bool:
        return await super().is_alive() and not (self.attendance is not None and self.attendance.silent)

    async def close(self) -> None:
        await asyncio.to_thread(self.shut_down)


def start_processes(configs: Sequence[EngineConfig], heartbeat_s: float = 1.0) -> list[ProcessClient]:
    """One engine process each, starting side by side.  If one can't start, none stays."""
    clients: list[ProcessClient] = []
    try:
        for config in configs:
            clients.append(ProcessClient(config, wait=False, heartbeat_s=heartbeat_s))
        for client in clients:
            client.await_start()
    except BaseException:
        for client in clients:
            client.shut_down()
        raise
    return clients
