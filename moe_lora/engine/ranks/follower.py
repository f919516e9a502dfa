# SPDX-License-Identifier: Apache-2.0
"""A rank that computes rank 0's schedule.

Run as `python -m moe_lora.engine.ranks.follower FD`.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import socket_folder
from moe_lora.core.teardown import end_at_hang_up, run_child
from moe_lora.dist.host_workers.workers import HostWorkers
from moe_lora.engine.adapters.copies import RankCopier
from moe_lora.engine.adapters.transfers import Mover
from moe_lora.engine.merging.merged_weights import MergeOrder
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.engine.step.step_batch import CaptureSteps, StepBatch, packed_message

from .followers import (
    HOST_STORE,
    Allocate,
    BeginOrder,
    Done,
    Followers,
    MemoryOrder,
    OrderEnded,
    RankReport,
    ServerOrder,
    SetUp,
    rank_counts,
    shared_layers,
)
from .rank import Rank
from .rank_runner import make_runner
from .regroup import FollowedSteps, JoinGroup, LeaveGroup

if TYPE_CHECKING:
    from .server_move import FollowedMoves

logger = logging.getLogger(__name__)


def follow(connection: Connection) -> None:
    """Follow rank 0; the process ends at once with rank 0."""
    with suppress(EOFError, ConnectionError):
        setup: SetUp = _receive(connection)
        end_at_hang_up(connection.fileno(), partial(shutil.rmtree, setup.directory, ignore_errors=True))
        try:
            rank, runner, host = _set_up(connection, setup)
        except Exception as error:
            _send(connection, Done(error))
            return
        _send(connection, Done())
        _obey(connection, rank, runner, host, setup.directory)


def _set_up(connection: Connection, setup: SetUp) -> tuple[Rank, ModelRunner, HostWorkers | None]:
    """Load, allocate, join; reports after each, so rank 0 never waits for a failed rank."""
    rank = Rank(setup.config, setup.dist_rank)
    _send(connection, Done())
    size: Allocate = _receive(connection)
    rank.allocate(size.num_pages, size.num_host_pages)
    _send(connection, Done())
    store = HostStore(setup.directory / HOST_STORE)
    host = None
    if setup.config.host_workers:
        rank.slots.present = shared_layers(setup.directory, rank.dist_rank, rank.slots.present.shape)
        host = rank.host.workers(rank, store)
    _send(connection, Done())
    exchanges = rank.join(setup.directory)
    _send(connection, Done())
    return rank, make_runner(rank, exchanges, host=host, find=partial(_find, store)), host


def _find(store: HostStore, content_hash: str) -> PackedAdapter:
    return store.get(content_hash, content_hash)


def _obey(
    connection: Connection, rank: Rank, runner: ModelRunner, host: HostWorkers | None, directory: Path
) -> NoReturn:
    copier = rank.copier(partial(_find, HostStore(directory / HOST_STORE)))
    answers = Answers(connection)
    copies = FollowerCopies(rank.mover, copier, answers.send)
    steps = FollowedSteps(rank, runner, directory)
    counts = rank_counts(directory, rank.dist_rank)
    moves: FollowedMoves | None = None
    while True:
        message = _receive(connection)
        if isinstance(message, StepBatch):
            steps.run(message)
            if host is not None:
                counts[0] = host.backend.num_fallback_rows
            if rank.lora_server is not None:
                there = rank.lora_server.backend
                counts[1:] = there.num_requests, there.num_fallback_rows, there.num_host_rows
        elif isinstance(message, MergeOrder):
            answers.send(_attempted(partial(runner.swap, message)))
        elif isinstance(message, CaptureSteps):
            runner.capture(message)
        elif isinstance(message, BeginOrder):
            copies.begin(message)
        elif isinstance(message, LeaveGroup):
            answers.send(Done(steps.leave()))
        elif isinstance(message, JoinGroup):
            answers.send(_attempted(partial(steps.join, message)))
        elif isinstance(message, RankReport):
            if host is not None:
                host.settle()
            answers.send(Done())
        elif isinstance(message, MemoryOrder):
            answers.send(_attempted(partial(message.carry_out, rank)))
        elif isinstance(message, ServerOrder):
            moves = moves or _moves(rank, directory)
            moves.carry_out(message)
        else:
            copier.carry_out(message)


def _moves(rank: Rank, directory: Path) -> FollowedMoves:
    from .server_move import FollowedMoves

    return FollowedMoves(rank, directory)


def _attempted(work: Callable[[], object]) -> Done:
    try:
        work()
    except Exception as error:
        logger.exception("an order of rank 0 failed")
        return Done(error)
    return Done()


class Answers:
    """Messages to rank 0, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Done | OrderEnded) -> None:
        """An error that can't be pickled becomes a RuntimeError."""
        if message.error is not None:
            message = replace(message, error=_portable(message.error))
        with self._lock, suppress(ConnectionError):  # rank 0 is gone, and this process ends
            _send(self._connection, message)


def _portable(error: Exception) -> Exception:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    return copy if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


class FollowerCopies:
    """Copies beside steps.  send: called from any thread."""

    def __init__(
        self,
        make_mover: Callable[[Callable[[], None]], Mover],
        copier: RankCopier,
        send: Callable[[OrderEnded], None],
    ) -> None:
        self._copier = copier
        self._send = send
        self._mover = make_mover(self._report)

    def begin(self, message: BeginOrder) -> None:
        """Start an order of rank 0; an error is this order's alone."""
        try:
            steps = self._copier.begin(message.order)
        except Exception as error:
            logger.exception("a copy failed")
            self._send(OrderEnded(message.number, error))
            return
        self._mover.submit(message.number, steps)

    def _report(self) -> None:
        for number, error in self._mover.finished():
            self._send(OrderEnded(number, error))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _send(connection: Connection, message: Done | OrderEnded) -> None:
    connection.send_bytes(packed_message(message))


_DIRECTORY_KEY = "moe_lora/instance_directory"
_SOCKET = "control"


def gather_followers(config: EngineConfig) -> Followers:
    """The other ranks of this torchrun job, all on one host.

    Raises ConfigError for another number of ranks.
    """
    store, _, size = _rendezvous()
    if size != config.num_ranks:
        raise ConfigError(
            f"torchrun started {size} processes for an instance of {config.num_ranks} (expert_parallel, "
            f"tensor_parallel); use --nproc-per-node {config.num_ranks}"
        )
    folder = socket_folder(_SOCKET)
    connections: dict[int, Connection] = {}
    with Listener(str(folder.path / _SOCKET), "AF_UNIX") as listener:
        store.set(_DIRECTORY_KEY, str(folder.path))
        while len(connections) < size - 1:
            connection = listener.accept()
            connections[connection.recv()] = connection
    return Followers([connections[dist_rank] for dist_rank in sorted(connections)], folder)


def follow_rank_0() -> None:
    """Follow this torchrun job's rank 0."""
    store, dist_rank, _ = _rendezvous()
    connection = Client(os.path.join(store.get(_DIRECTORY_KEY).decode(), _SOCKET), "AF_UNIX")
    connection.send(dist_rank)
    follow(connection)


def _rendezvous() -> tuple[dist.Store, int, int]:
    return next(dist.rendezvous("env://"))


if __name__ == "__main__":
    run_child(lambda fd: follow(Connection(fd)))
