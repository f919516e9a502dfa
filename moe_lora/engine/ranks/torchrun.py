"""An instance whose processes torchrun started: `torchrun --nproc-per-node P …`, all on one host.

Rank 0 builds its engine with `gather_followers`, the others run `follow_rank_0`.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Client, Connection, Listener

import torch.distributed as dist

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError

from .follower import follow
from .followers import Followers, instance_directory

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
