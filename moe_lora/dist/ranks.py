"""The LoRA Server's ranks as processes of this host: started together, each started again when it ends."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from moe_lora.config import EngineConfig
from moe_lora.core.errors import LoraServerError
from moe_lora.engine.process import start_child

logger = logging.getLogger(__name__)

THREADS_PER_RANK = 1
_STOP_TIMEOUT_S = 10.0
_PAUSE_S = 1.0
_QUICK_S = 10.0
_MAX_QUICK_DEATHS = 5


@dataclass(frozen=True)
class StartRank:
    """First message to a rank's process (`dist.worker`).

    config: of the instances; it names the server.  directory: of the server, deleted with it.
    """

    config: EngineConfig
    server_rank: int
    directory: Path | None = None


@dataclass(frozen=True)
class Started:
    """Its answer.  error: why it can't serve."""

    error: Exception | None = None


class RankProcess:
    """One rank's process, which ends when this one does."""

    def __init__(self, start: StartRank) -> None:
        self._process, self._connection = start_child(
            "moe_lora.dist.worker", "--lora-server-fd", num_threads=THREADS_PER_RANK
        )
        self._connection.send(start)
        self._started = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_start(self) -> None:
        """Return once the rank serves.  Raises what kept it from it."""
        try:
            started: Started = self._connection.recv()
        except (EOFError, OSError) as error:
            raise LoraServerError(
                f"a LoRA Server rank ended with exit code {self._process.wait()} while starting"
            ) from error
        if started.error is not None:
            raise started.error
        self._started = True

    def wait(self) -> int:
        return self._process.wait()

    def stop(self) -> None:
        """End the process: closing the connection asks it to; one that is still starting is ended at once."""
        if not self._started:
            self._process.kill()
        else:
            self._connection.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LoraServerProcesses:
    """All ranks of one LoRA Server on this host.

    Raises, from the constructor, what kept a rank from starting.  directory: of the server, deleted by the
    ranks when they are stopped or this process is killed.
    """

    def __init__(self, config: EngineConfig, num_ranks: int, directory: Path | None = None) -> None:
        self._config = config
        self._directory = directory
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._ranks = [self._start(number, config) for number in range(num_ranks)]
        try:
            for rank in self._ranks:
                rank.await_start()
        except BaseException:
            self.stop()
            raise
        for number in range(num_ranks):
            threading.Thread(target=self._watch, args=(number,), name="rank-watch", daemon=True).start()

    def stop(self) -> None:
        """End all ranks; those that share memory with clients last."""
        with self._lock:
            self._stopping.set()
            ranks = list(self._ranks)
        for rank in reversed(ranks):
            rank.stop()

    def _start(self, number: int, config: EngineConfig) -> RankProcess:
        return RankProcess(StartRank(config, number, self._directory))

    def _watch(self, number: int) -> None:
        quick_deaths = 0
        while True:
            started_s = time.monotonic()
            code = self._ranks[number].wait()
            if self._stopping.is_set():
                return
            quick_deaths = quick_deaths + 1 if time.monotonic() - started_s < _QUICK_S else 1
            logger.warning("LoRA Server rank %d ended with exit code %d", number, code)
            if quick_deaths >= _MAX_QUICK_DEATHS:
                logger.error("LoRA Server rank %d keeps ending; instances compute its deltas", number)
                return
            self._stopping.wait(_PAUSE_S * (quick_deaths - 1))
            self._restart(number)

    def _restart(self, number: int) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            rank = self._ranks[number] = self._start(number, self._config)
        try:
            rank.await_start()
        except Exception as error:
            if not self._stopping.is_set():
                logger.error("LoRA Server rank %d could not be started again: %s", number, error)
        else:
            logger.info("LoRA Server rank %d is back (process %d)", number, rank.pid)
