# SPDX-License-Identifier: Apache-2.0
"""The other ranks of an instance, as rank 0 sees them: processes of this host behind one connection each.

Rank 0 schedules.  What it tells its followers (`engine.ranks.follower`) arrives in order: what they need to
set up, then steps and slots to fill.  Hanging up ends them; either side notices at once when the other is
gone.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from moe_lora.config import EngineConfig
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.core.processes import STOP_TIMEOUT_S, start_child
from moe_lora.engine.step.step_batch import packed_message

HOST_STORE = "adapters"
"""Packed adapters, in an instance's directory."""


@dataclass(frozen=True)
class SetUp:
    """A follower's first message.  directory: of this instance, on this host, deleted with it."""

    config: EngineConfig
    dist_rank: int
    directory: Path


@dataclass(frozen=True)
class Allocate:
    """Take arenas of this size, join the others."""

    num_pages: int
    num_host_pages: int


@dataclass(frozen=True)
class BeginOrder:
    """Carry a `RankOrder` out beside the steps that follow."""

    number: int
    order: Any


@dataclass(frozen=True)
class OrdersDone:
    """These have ended at rank 0, and what follows relies on it.  failed: those that were not carried out."""

    numbers: tuple[int, ...]
    failed: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankReport:
    """Answer once everything before this is done."""


@dataclass(frozen=True)
class Done:
    """A follower's answer.  error: why it could not."""

    error: Exception | None = None


class Followers:
    """Ranks 1 .. P-1.

    connections: one each, in rank order; none where rank 0 is alone.  folder: see `SetUp.directory`; it
    stands in for passwords between the ranks; None where rank 0 is alone.  processes: the followers, if this
    process started them.
    """

    def __init__(
        self,
        connections: Sequence[Connection] = (),
        folder: OwnFolder | None = None,
        processes: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self._connections = connections
        self._processes = processes
        self._ending = threading.Event()
        self._folder = folder
        self._host_counts: list[np.ndarray] = []

    @property
    def directory(self) -> Path:
        """Of this instance, where there are followers."""
        assert self._folder is not None
        return self._folder.path

    def set_up(self, config: EngineConfig) -> None:
        """Have all load their part of the model; `settle` waits for it."""
        for dist_rank in range(1, len(self._connections) + 1):
            self._send(dist_rank, packed_message(SetUp(config, dist_rank, self.directory)))

    def tell(self, message: Any) -> None:
        """Send to all.  Raises EngineDeadError if one is gone."""
        data = packed_message(message) if self._connections else b""
        for dist_rank in range(1, len(self._connections) + 1):
            self._send(dist_rank, data)

    def _send(self, dist_rank: int, data: bytes) -> None:
        try:
            self._connections[dist_rank - 1].send_bytes(data)
        except OSError as error:
            raise self._lost(dist_rank) from error

    def settle(self, within_s: float | None = None) -> None:
        """Wait until all have answered.

        Raises what kept one from doing what it was told, EngineDeadError if one is gone or does not answer
        within this time (None: however long it takes).
        """
        for dist_rank, connection in enumerate(self._connections, start=1):
            try:
                if not connection.poll(within_s):
                    raise EngineDeadError(
                        f"rank {dist_rank} of this instance does not answer within {within_s:g} s; "
                        "restart the instance"
                    )
                done: Done = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise self._lost(dist_rank) from error
            if done.error is not None:
                raise done.error

    def watch(self, on_loss: Callable[[EngineDeadError], None]) -> None:
        """Call `on_loss`, from another thread, when a follower ends unasked."""
        for dist_rank, process in enumerate(self._processes, start=1):
            watcher = threading.Thread(
                target=self._await_end, args=(dist_rank, process, on_loss), name="follower-watch", daemon=True
            )
            watcher.start()

    def _await_end(
        self, dist_rank: int, process: subprocess.Popen[bytes], on_loss: Callable[[EngineDeadError], None]
    ) -> None:
        process.wait()
        if not self._ending.is_set():
            on_loss(self._lost(dist_rank))

    def _lost(self, dist_rank: int) -> EngineDeadError:
        how = "is gone"
        if self._processes:
            try:
                code = self._processes[dist_rank - 1].wait(STOP_TIMEOUT_S)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            except subprocess.TimeoutExpired:
                how = "closed its connection"
        return EngineDeadError(f"rank {dist_rank} of this instance {how}; restart the instance")

    def host_fallback_rows(self) -> int:
        """Rows that followers computed since their host workers did not."""
        if not self._host_counts:
            ranks = range(1, len(self._connections) + 1)
            self._host_counts = [host_counts(self.directory, dist_rank) for dist_rank in ranks]
        return sum(int(counts[0]) for counts in self._host_counts)

    def close(self, *, at_once: bool = False) -> None:
        """End all followers, and what the instance left on disk; may be called again.

        at_once: don't wait for them to end on their own; one may hang.
        """
        if self._ending.is_set():
            return
        self._ending.set()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(0 if at_once else STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.remove()


def start_followers(config: EngineConfig) -> Followers:
    """Start ranks 1 .. num_ranks - 1 as processes that end with this one."""
    connections: list[Connection] = []
    processes: list[subprocess.Popen[bytes]] = []
    for _ in range(1, config.num_ranks):
        process, connection = start_child(
            "moe_lora.engine.ranks.follower", num_threads=config.threads_per_process
        )
        processes.append(process)
        connections.append(connection)
    return Followers(connections, OwnFolder(), processes)


def host_counts(directory: Path, dist_rank: int) -> np.ndarray:
    """[1] int64 that other ranks see: rows that this rank computed since its host workers did not."""
    path = directory / f"host-counts-{dist_rank}"
    return np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(1,))
