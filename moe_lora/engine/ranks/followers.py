# SPDX-License-Identifier: Apache-2.0
"""Rank 0's view of the other ranks: processes of this host, a connection each.

A hang-up ends followers; each side detects the other's end at once.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.core.processes import STOP_TIMEOUT_S, Child, end_children, start_child
from moe_lora.engine.step.step_batch import packed_message

if TYPE_CHECKING:
    from moe_lora.engine.step.runner import ModelRunner

    from .rank import Rank

logger = logging.getLogger(__name__)
T = TypeVar("T")
MEET_TIMEOUT_S = 60.0
"""Time to connect the ranks; none computes meanwhile."""
STOPPED_S = 20.0
"""Time until a stopped (SIGSTOP) follower is killed.

Below `heartbeat_dead_s`: a stopped follower would outlive a killed rank 0.
"""
_LOOK_S = 0.5
HOST_STORE = "adapters"
"""Folder of packed adapters in an instance's directory."""


@dataclass(frozen=True)
class SetUp:
    """A follower's first message.  directory: deleted with the instance."""

    config: EngineConfig
    dist_rank: int
    directory: Path


@dataclass(frozen=True)
class Allocate:
    """Allocate arenas, and join the other ranks."""

    num_pages: int
    num_host_pages: int


@dataclass(frozen=True)
class BeginOrder:
    """Execute an order beside later steps."""

    number: int
    order: Any


@dataclass(frozen=True)
class OrderEnded:
    """An order ended at a follower."""

    number: int
    error: Exception | None = None


MemoryStep = Literal["free_arenas", "free_weights", "read_weights"]
"""A method of `Rank`."""


@dataclass(frozen=True)
class MemoryOrder:
    """Call these methods of the rank, and answer."""

    steps: tuple[MemoryStep, ...]

    def carry_out(self, rank: Rank) -> None:
        for step in self.steps:
            getattr(rank, step)()


@dataclass(frozen=True)
class ServerOrder:
    """A part of a move to the next LoRA Server (`server_move`), without an answer.

    server: to reach, within limit_s.
    """

    number: int
    step: Literal["reach", "move", "close"]
    server: LoraServerConfig | None = None
    limit_s: float = 0.0


@dataclass(frozen=True)
class RankReport:
    """Answer after earlier messages."""


@dataclass(frozen=True)
class Done:
    """A follower's answer."""

    error: Exception | None = None


OrderResult: TypeAlias = tuple[int, Exception | None]
"""Number and error of an ended order."""


@dataclass
class _Ended:
    """An order since its first end.  errors: by rank."""

    since_s: float
    errors: dict[int, Exception | None] = field(default_factory=dict)

    @property
    def error(self) -> Exception | None:
        return next(filter(None, self.errors.values()), None)


class Followers:
    """Ranks 1 .. P-1.

    connections: in rank order.  folder: file permissions replace passwords.  children: followers of this
    keeper.
    """

    def __init__(
        self,
        connections: Sequence[Connection] = (),
        folder: OwnFolder | None = None,
        children: Sequence[Child] = (),
        timeout_s: float = EngineConfig.rank_timeout_s,
    ) -> None:
        self.timeout_s = timeout_s
        self._connections = connections
        self._children = children
        self._ending = threading.Event()
        self._reading = threading.Lock()
        self._folder = folder
        self._counts: list[np.ndarray] = []
        self._ended: dict[int, _Ended] = {}
        """Orders with an end on some ranks."""
        self.lagging = False
        """True with orders in `_ended`."""
        self.layers: LoadedLayers | None = None
        """For the layers under load."""

    @property
    def directory(self) -> Path:
        assert self._folder is not None
        return self._folder.path

    @property
    def num_followers(self) -> int:
        return len(self._connections)

    @property
    def closed(self) -> bool:
        return self._ending.is_set()

    def set_up(self, config: EngineConfig) -> None:
        """Start the load of each follower's model; `settle` waits for the end."""
        for dist_rank in range(1, len(self._connections) + 1):
            self._send(dist_rank, packed_message(SetUp(config, dist_rank, self.directory)))

    def tell(self, message: Any) -> None:
        """Send to all.  Raises EngineDeadError."""
        data = packed_message(message) if self._connections else b""
        for dist_rank in range(1, len(self._connections) + 1):
            self._send(dist_rank, data)

    def _send(self, dist_rank: int, data: bytes) -> None:
        try:
            self._connections[dist_rank - 1].send_bytes(data)
        except OSError as error:
            raise self._lost(dist_rank) from error

    def settle(self, within_s: float | None = None) -> None:
        """Wait until all have answered; raises a follower's error.

        Raises EngineDeadError if a follower is gone, or late (within_s None: unlimited).
        """
        for error in filter(None, self.answers(within_s)):
            raise error

    @contextmanager
    def answering(self, message: Any, within_s: float | None = None) -> Iterator[None]:
        """Send to all; `settle` at the end, in any thread.  Other readers wait."""
        with self._reading:
            self.tell(message)
            try:
                yield
            finally:
                for error in filter(None, self._answers(within_s)):
                    raise error

    def all_answered(self) -> bool:
        """Wait until all have carried out earlier messages; False, at once, if another thread waits."""
        if self._reading.locked():
            return False
        with self.answering(RankReport(), self.timeout_s):
            return True

    def answers(
        self, within_s: float | None = None, until: Connection | None = None
    ) -> list[Exception | None]:
        """Wait until all have answered, or `until` hangs up; returns their errors.

        Raises EngineDeadError as `settle`.
        """
        with self._reading:
            return self._answers(within_s, until)

    def _answers(self, within_s: float | None, until: Connection | None = None) -> list[Exception | None]:
        waiting: dict[Any, int] = dict(zip(self._connections, count(1), strict=False))
        errors: dict[int, Exception | None] = {}
        while waiting:
            ready = wait_for([*waiting, *([] if until is None else [until])], within_s)
            if not ready:
                assert within_s is not None
                raise self._silent(min(waiting.values()), within_s)
            if until in ready:
                break
            for connection in ready:
                dist_rank = waiting[connection]
                message = self._receive(dist_rank)
                if isinstance(message, Done):
                    errors[dist_rank] = message.error
                    del waiting[connection]
                elif message is not None:
                    self._note_end(dist_rank, message.number, message.error)
        return [errors[dist_rank] for dist_rank in sorted(errors)]

    def meet(self, join: Callable[[], T]) -> T:
        """Connect rank 0 with the joining followers; returns the result of `join`.

        Raises the error of `join` without a wait, and EngineDeadError.
        """
        failed, joining = Pipe(duplex=False)
        has_failed = threading.Event()

        def hang_up(_: BaseException) -> None:
            has_failed.set()  # before the other thread sees the hang-up
            joining.close()

        pool = ThreadPool(1)  # this thread notices the end of a follower
        joined = pool.apply_async(join, error_callback=hang_up)
        pool.close()
        with failed:
            errors = self.answers(MEET_TIMEOUT_S, failed)
            for error in filter(None, [] if has_failed.is_set() else errors):
                raise error  # `joining` belongs to `hang_up` until the result is there
            result = joined.get()
        joining.close()
        return result

    def _receive(self, dist_rank: int) -> Done | OrderEnded | None:
        """A follower's next message, if any.  Raises EngineDeadError."""
        connection = self._connections[dist_rank - 1]
        try:
            message = pickle.loads(connection.recv_bytes()) if connection.poll() else None
        except (EOFError, OSError) as error:
            raise self._lost(dist_rank) from error
        assert message is None or isinstance(message, (Done, OrderEnded))
        return message

    def ended_everywhere(self, ended: list[OrderResult]) -> list[OrderResult]:
        """Orders that ended on all ranks since the last call, with the first error.

        ended: at rank 0.  Raises EngineDeadError.
        """
        if not self._connections:
            return ended
        for number, error in ended:
            self._note_end(0, number, error)
        self.lagging = bool(self._ended)
        if not self._reading.acquire(blocking=False):  # another thread waits for answers, and reads the rest
            return []
        try:
            self._read_ends()
        finally:
            self._reading.release()
        num_ranks, now_s = len(self._connections) + 1, time.monotonic()
        for order in self._ended.values():
            if len(order.errors) < num_ranks and now_s - order.since_s > self.timeout_s:
                raise self._silent(min(set(range(num_ranks)) - set(order.errors)), self.timeout_s)
        whole = [number for number, order in self._ended.items() if len(order.errors) == num_ranks]
        results = [(number, self._ended.pop(number).error) for number in whole]
        self.lagging = bool(self._ended)
        return results

    def _read_ends(self) -> None:
        for dist_rank in range(1, len(self._connections) + 1):
            while (message := self._receive(dist_rank)) is not None:
                assert isinstance(message, OrderEnded), "a follower answers only while rank 0 waits"
                self._note_end(dist_rank, message.number, message.error)

    def _note_end(self, dist_rank: int, number: int, error: Exception | None) -> None:
        self._ended.setdefault(number, _Ended(time.monotonic())).errors[dist_rank] = error

    def watch(self, on_loss: Callable[[EngineDeadError], None]) -> None:
        """Set `on_loss`, called from another thread at a follower's unexpected end."""
        for dist_rank, child in enumerate(self._children, start=1):

            def tell(_: Future[int], dist_rank: int = dist_rank) -> None:
                if not self._ending.is_set():
                    on_loss(self._lost(dist_rank))

            child.ended.add_done_callback(tell)

    def end_stopped(self) -> None:
        """Kill a child stopped for STOPPED_S, from another thread.

        Counts looks in place of seconds: a pause of the whole host harms no follower.  CPU time restarts the
        count, for a limiter of CPU use.
        """

        def look() -> None:
            stopped, ticks = dict.fromkeys(self._children, 0), dict.fromkeys(self._children, -1)
            while not self._ending.wait(_LOOK_S):
                for dist_rank, child in enumerate(self._children, start=1):
                    before, ticks[child] = ticks[child], child.cpu_ticks
                    stands = child.is_stopped and ticks[child] == before
                    stopped[child] = stopped[child] + 1 if stands else 0
                    if stopped[child] * _LOOK_S >= STOPPED_S:
                        logger.error("rank %d is stopped for %g s and is ended", dist_rank, STOPPED_S)
                        child.process.kill()

        threading.Thread(target=look, name="stopped-ranks", daemon=True).start()

    def _lost(self, dist_rank: int) -> EngineDeadError:
        how = "is gone"
        if self._children:
            child = self._children[dist_rank - 1]
            wait([child.ended], STOP_TIMEOUT_S)
            how = child.how_ended if child.ended.done() else "closed its connection"
        return EngineDeadError(f"rank {dist_rank} of this instance {how}; restart the instance")

    def _silent(self, dist_rank: int, within_s: float) -> EngineDeadError:
        cause = "this machine is overloaded" if within_s != self.timeout_s else "rank_timeout_s is too short"
        how = f"does not answer within {within_s:g} s: it hangs, or {cause}"
        return EngineDeadError(f"rank {dist_rank} of this instance {how}; restart the instance")

    def attach(self, runner: ModelRunner, rank: Rank) -> None:
        """Report other ranks' errors in merges, and on CPU in steps, to rank 0."""
        runner.settle_others = self.settle
        if rank.device.type == "cpu":
            from .regroup import Regroup

            runner.regroup = Regroup(rank, self)

    def loaded_layers(self, own: np.ndarray, num_layers: int) -> LoadedLayers:
        """own: `SlotTable.present` of rank 0.  num_layers: without the outer sites."""
        ranks = range(1, len(self._connections) + 1)
        of_ranks = [own, *(shared_layers(self.directory, rank, own.shape) for rank in ranks)]
        own, *others = (one[:, :num_layers] for one in of_ranks)
        self.layers = LoadedLayers(own, others)
        return self.layers

    def counts(self) -> list[int]:
        """Sums of the followers' `rank_counts`."""
        if not self._counts:
            ranks = range(1, len(self._connections) + 1)
            self._counts = [rank_counts(self.directory, dist_rank) for dist_rank in ranks]
        return [int(count) for count in np.sum(self._counts, axis=0)]

    def close(self, *, at_once: bool = False) -> None:
        """End all followers, and delete the instance's files.  Idempotent.

        at_once: don't wait; a follower may hang.
        """
        if self._ending.is_set():
            return
        self._ending.set()
        for connection in self._connections:
            connection.close()
        end_children(self._children, 0 if at_once else STOP_TIMEOUT_S)
        if self._folder is not None:
            self._folder.remove()


def start_followers(config: EngineConfig) -> Followers:
    """Start the other ranks as processes that end with this process."""
    connections: list[Connection] = []
    children: list[Child] = []
    followers = Followers(connections, OwnFolder(), children, config.rank_timeout_s)
    try:
        for _ in range(1, config.num_ranks):
            child, connection = start_child(
                "moe_lora.engine.ranks.follower", num_threads=config.threads_per_process
            )
            children.append(child)
            connections.append(connection)
    except BaseException:
        followers.close()
        raise
    followers.end_stopped()
    return followers


class LoadedLayers:
    """Layers of each slot, loaded on all ranks.

    own: [slots, layers] bool, of rank 0.
    """

    def __init__(self, own: np.ndarray, others: Sequence[np.ndarray]) -> None:
        self._own = own
        self._others = others

    def __getitem__(self, slot: int) -> np.ndarray:
        return np.logical_and.reduce([self._own[slot], *(other[slot] for other in self._others)])

    def clear(self, slot: int) -> None:
        """Before a load: a follower may have yet to clear its slot."""
        for other in self._others:
            other[slot] = False


def shared_layers(directory: Path, dist_rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """One follower's `SlotTable.present`, shared with rank 0.  shape: of the whole table."""
    path = directory / f"layers-{dist_rank}"
    return np.memmap(path, np.bool_, "r+" if path.exists() else "w+", shape=shape)


def rank_counts(directory: Path, dist_rank: int) -> np.ndarray:
    """[4] int64, shared: rows of this rank in place of host workers; then of its backend at the LoRA Server
    `num_requests`, `num_fallback_rows` and `num_host_rows`."""
    path = directory / f"counts-{dist_rank}"
    path.touch()  # no mode that cuts a file which another rank has mapped
    return np.memmap(path, np.int64, "r+", shape=(4,))
