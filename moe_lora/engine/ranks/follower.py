"""A rank of an instance that computes what rank 0 schedules.

Run as `python -m moe_lora.engine.ranks.follower FD`.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.processes import wait_for_hang_up
from moe_lora.engine.runner import StepBatch, packed_message

from .followers import HOST_STORE, Allocate, Done, Followers, RankReport, SetUp, instance_directory

if TYPE_CHECKING:
    from moe_lora.engine.runner import ModelRunner

    from .rank import Rank

logger = logging.getLogger(__name__)


def follow(connection: Connection) -> None:
    """Carry out what rank 0 says; the process ends at once when rank 0 is gone or hangs up."""
    try:
        setup: SetUp = _receive(connection)
        watch = (connection.fileno(), setup.directory)
        threading.Thread(target=_end_with_leader, args=watch, name="leader-watch", daemon=True).start()
        try:
            rank, runner = _set_up(connection, setup)
        except Exception as error:
            _send(connection, Done(error))
            return
        _send(connection, Done())
        _obey(connection, rank, runner, setup.directory / HOST_STORE)
    except (EOFError, ConnectionError):
        logger.info("rank 0 hung up")


def _set_up(connection: Connection, setup: SetUp) -> tuple[Rank, ModelRunner]:
    """Load, allocate, meet the others; rank 0 hears after each, so it never waits for one that failed."""
    from .rank import Rank

    rank = Rank(setup.config, setup.dist_rank)
    _send(connection, Done())
    size: Allocate = _receive(connection)
    rank.allocate(size.num_pages, size.num_host_pages)
    _send(connection, Done())
    return rank, rank.runner(rank.join(setup.directory))


def _obey(connection: Connection, rank: Rank, runner: ModelRunner, store_dir: Path) -> NoReturn:
    """The follower's loop: steps and copies, one after the other in the order they come."""
    from moe_lora.adapters.host_store import HostStore
    from moe_lora.engine.adapters.copies import RankOrder

    store = HostStore(store_dir)
    copier = rank.copier(lambda content_hash: store.get(content_hash, content_hash))
    while True:
        message = _receive(connection)
        if isinstance(message, StepBatch):
            runner.execute(message)
        elif isinstance(message, RankOrder):
            copier.carry_out(message)
        else:
            assert isinstance(message, RankReport), message
            _send(connection, Done())


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _send(connection: Connection, message: Done) -> None:
    connection.send_bytes(packed_message(message))


def _end_with_leader(fd: int, directory: Path) -> None:
    """Nothing that the main thread waits for may keep this process alive without rank 0."""
    wait_for_hang_up(fd)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main() -> None:
    # Rank 0 decides when its followers end; a Ctrl-C in its terminal must not end them first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    follow(Connection(int(sys.argv[1])))


# An instance whose processes torchrun started: `torchrun --nproc-per-node P …`, all on one host.
#
# Rank 0 builds its engine with `gather_followers`, the others run `follow_rank_0`.


_DIRECTORY_KEY = "moe_lora/instance_directory"
_SOCKET = "control"


def gather_followers(config: EngineConfig) -> Followers:
    """The other ranks of this torchrun job, for `build_engine`.

    Raises ConfigError if the job has another size than the settings ask for.
    """
    store, _, size = _rendezvous()
    if size != config.expert_parallel:
        raise ConfigError(
            f"torchrun started {size} processes for expert_parallel={config.expert_parallel}; "
            f"use --nproc-per-node {config.expert_parallel}"
        )
    directory = instance_directory()
    connections: dict[int, Connection] = {}
    with Listener(str(directory / _SOCKET), "AF_UNIX") as listener:
        store.set(_DIRECTORY_KEY, str(directory))
        while len(connections) < size - 1:
            connection = listener.accept()
            connections[connection.recv()] = connection
    return Followers([connections[dist_rank] for dist_rank in sorted(connections)], directory)


def follow_rank_0() -> None:
    """Compute what rank 0 of this torchrun job schedules, until it ends."""
    store, dist_rank, _ = _rendezvous()
    directory = store.get(_DIRECTORY_KEY).decode()
    connection = Client(os.path.join(directory, _SOCKET), "AF_UNIX")
    connection.send(dist_rank)
    follow(connection)


def _rendezvous() -> tuple[dist.Store, int, int]:
    """The job's store, this rank and the number of ranks."""
    return next(dist.rendezvous("env://"))


if __name__ == "__main__":
    main()
