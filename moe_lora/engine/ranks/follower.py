# SPDX-License-Identifier: Apache-2.0
"""A rank of an instance that computes rank 0's schedule.

Run as `python -m moe_lora.engine.ranks.follower FD`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import OwnFolder
from moe_lora.core.teardown import end_at_hang_up, run_child
from moe_lora.dist.host_workers.workers import HostWorkers
from moe_lora.engine.adapters.copies import Steps
from moe_lora.engine.adapters.transfers import LOOK_S, Mover
from moe_lora.engine.merging.merged_weights import MergeOrder
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.engine.step.step_batch import CaptureSteps, StepBatch, packed_message
from moe_lora.lora.row_routing import RowRouting

from .followers import (
    HOST_STORE,
    Allocate,
    BeginOrder,
    Done,
    Followers,
    OrdersDone,
    RankReport,
    SetUp,
    host_counts,
)
from .rank import Rank
from .rank_runner import make_runner


def follow(connection: Connection) -> None:
    """Follow rank 0; the process ends at once when rank 0 ends or hangs up."""
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
    """Load, allocate, join; reports to rank 0 after each, so rank 0 never waits for a failed rank."""
    rank = Rank(setup.config, setup.dist_rank)
    _send(connection, Done())
    size: Allocate = _receive(connection)
    rank.allocate(size.num_pages, size.num_host_pages)
    _send(connection, Done())
    store = HostStore(setup.directory / HOST_STORE)
    host = rank.host.workers(rank, store) if setup.config.host_workers else None
    _send(connection, Done())
    find = partial(_find, store)
    return rank, make_runner(rank, rank.join(setup.directory), host=host, find=find), host


def _find(store: HostStore, content_hash: str) -> PackedAdapter:
    return store.get(content_hash, content_hash)


def _obey(
    connection: Connection, rank: Rank, runner: ModelRunner, host: HostWorkers | None, directory: Path
) -> NoReturn:
    store = HostStore(directory / HOST_STORE)
    copier = rank.copier(partial(_find, store))
    copies = FollowerCopies(rank.mover(lambda: None), rank.present)
    counts = host_counts(directory, rank.dist_rank)
    while True:
        message = _receive(connection)
        if isinstance(message, StepBatch):
            copies.wait_for_layers(message.routing)
            runner.execute(message)
            if host is not None:
                counts[0] = host.backend.num_fallback_rows
        elif isinstance(message, MergeOrder):
            runner.swap(message)
        elif isinstance(message, CaptureSteps):
            runner.capture(message)
        elif isinstance(message, BeginOrder):
            copies.begin(message.number, copier.begin(message.order))
        elif isinstance(message, OrdersDone):
            copies.wait_for(message)
        elif isinstance(message, RankReport):
            if host is not None:
                host.settle()
            _send(connection, Done())
        else:
            copier.carry_out(message)


class FollowerCopies:
    """Running copies of this rank beside its steps.  present: [slots, layers] bool, loaded layers."""

    def __init__(self, mover: Mover, present: np.ndarray) -> None:
        self._mover = mover
        self._present = present
        self._under_way: set[int] = set()
        self._failed: dict[int, Exception] = {}

    def begin(self, number: int, steps: Steps) -> None:
        self._under_way.add(number)
        self._mover.submit(number, steps)

    def wait_for(self, done: OrdersDone) -> None:
        """Return after the end of these copies.  Raises the error of a copy that succeeded on rank 0."""
        while not self._under_way.isdisjoint(done.numbers):
            self._settle()
        for number in done.numbers:
            error = self._failed.pop(number, None)
            if error is not None and number not in done.failed:
                raise error

    def wait_for_layers(self, routing: RowRouting) -> None:
        """Return once all layers for the step's device part are loaded.

        Raises a copy's error, once no copy runs: an earlier error may be another adapter's, also failed at
        rank 0.
        """
        if routing.here is None:
            return
        for route, slot in routing.loading_slots.items():
            while not self._present[slot][routing.here[route]].all():
                for error in () if self._under_way else self._failed.values():
                    raise error
                self._settle()

    def _settle(self) -> None:
        finished = self._mover.finished()
        for number, error in finished:
            self._under_way.discard(number)
            if error is not None:
                self._failed[number] = error
        if not finished:
            time.sleep(LOOK_S)


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _send(connection: Connection, message: Done) -> None:
    connection.send_bytes(packed_message(message))


_DIRECTORY_KEY = "moe_lora/instance_directory"
_SOCKET = "control"


def gather_followers(config: EngineConfig) -> Followers:
    """The other ranks of this torchrun job (all on one host), for `build_engine`.

    Raises ConfigError if the job's size differs from the settings.
    """
    store, _, size = _rendezvous()
    if size != config.num_ranks:
        raise ConfigError(
            f"torchrun started {size} processes for an instance of {config.num_ranks} (expert_parallel, "
            f"tensor_parallel); use --nproc-per-node {config.num_ranks}"
        )
    folder = OwnFolder()
    connections: dict[int, Connection] = {}
    with Listener(str(folder.path / _SOCKET), "AF_UNIX") as listener:
        store.set(_DIRECTORY_KEY, str(folder.path))
        while len(connections) < size - 1:
            connection = listener.accept()
            connections[connection.recv()] = connection
    return Followers([connections[dist_rank] for dist_rank in sorted(connections)], folder)


def follow_rank_0() -> None:
    """On a rank other than 0: compute the schedule of this torchrun job's rank 0, until the end."""
    store, dist_rank, _ = _rendezvous()
    directory = store.get(_DIRECTORY_KEY).decode()
    connection = Client(os.path.join(directory, _SOCKET), "AF_UNIX")
    connection.send(dist_rank)
    follow(connection)


def _rendezvous() -> tuple[dist.Store, int, int]:
    return next(dist.rendezvous("env://"))


if __name__ == "__main__":
    run_child(lambda fd: follow(Connection(fd)))
