"""The ranks of one instance, started by one torchrun on one host: the others come to the first."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from moe_lora.core.config import EngineConfig
from moe_lora.core.errors import ConfigError, EngineDeadError
from moe_lora.engine.follower import follow
from moe_lora.engine.followers import Followers, instance_directory

_MEET_S = 120.0
_RETRY_S = 0.1


def meet_followers(config: EngineConfig, key: str, num_ranks: int) -> Followers:
    """Wait for ranks 1 .. num_ranks - 1.  Raises EngineDeadError if one does not come."""
    path = _meeting_point(key, config.instance)
    path.unlink(missing_ok=True)
    found: dict[int, Connection] = {}
    with Listener(str(path), family="AF_UNIX", authkey=key.encode()) as listener:
        _limit_accept(listener)
        while len(found) < num_ranks - 1:
            try:
                connection = listener.accept()
            except OSError as error:
                missing = sorted(set(range(1, num_ranks)) - found.keys())
                raise EngineDeadError(
                    f"rank {missing} of {config.instance} did not come within {_MEET_S:g} s"
                ) from error
            found[connection.recv()] = connection
    return Followers([found[dist_rank] for dist_rank in sorted(found)], instance_directory())


def join_engine(key: str, name: str, dist_rank: int) -> None:
    """Follow the first rank until it ends.  Raises ConfigError if it is not on this host."""
    # The first rank decides when its followers end; they notice when it is gone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    path = _meeting_point(key, name)
    deadline_s = time.monotonic() + _MEET_S
    while True:
        try:
            connection = Client(str(path), family="AF_UNIX", authkey=key.encode())
            break
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"rank {dist_rank} of {name} can't find rank 0 on this host; the ranks of an instance "
                    "share a host: start them with one torchrun"
                ) from error
            time.sleep(_RETRY_S)
    connection.send(dist_rank)
    follow(connection)


def _meeting_point(key: str, name: str) -> Path:
    """A socket that only the processes of this start of this job look for."""
    start = [os.environ.get(part, "") for part in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", _RESTARTS)]
    digest = hashlib.sha256("\0".join([key, name, *start]).encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"moe_lora-{digest[:24]}"


def _limit_accept(listener: Listener) -> None:
    sock: socket.socket = listener._listener._socket  # type: ignore[attr-defined]
    sock.settimeout(_MEET_S)


_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
