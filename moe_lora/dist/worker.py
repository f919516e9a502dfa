"""Entry point of a role's process: a LoRA Server rank, or an LLM instance, of the cluster in a file.

    torchrun --nproc-per-node 2 -m moe_lora.dist.worker --config cluster.yaml --role lora-server
    torchrun -m moe_lora.dist.worker --config cluster.yaml --role instance --name instance-1

A role of one process needs no torchrun: python -m moe_lora.dist.worker and the same options.  With
--lora-server-fd it is a rank that `moe-lora serve` started on its own host.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from moe_lora.core.errors import MoeLoraError
from moe_lora.core.teardown import quiet_teardown

from .ranks import Started, StartRank


def serve_rank(connection: Connection) -> None:
    """Serve the rank that the first message describes until the connection closes."""
    from .build import build_rank

    start: StartRank = connection.recv()
    stop = Stop(start.directory)
    threading.Thread(target=_await_end, args=(connection, stop), name="parent-watch", daemon=True).start()
    try:
        rank = build_rank(start)
    except Exception as error:
        connection.send(Started(error))
        return
    connection.send(Started())
    stop.end_with(rank.stop)
    rank.run()
    stop.clean_up()


class Stop:
    """How this process ends when its parent says so, or is gone: at once while it is starting, then by the
    rank's own `stop`.

    directory: of the whole server; goes with it, also when the process that made it was killed.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._asked = False
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None

    def end_with(self, stop: Callable[[], None]) -> None:
        with self._lock:
            self._stop = stop

    def ask(self) -> None:
        with self._lock:
            self._asked = True
            if self._stop is None:
                self.clean_up()
                os._exit(0)  # nothing else ends a wait for the leader, and nobody waits for this rank
            self._stop()

    def clean_up(self) -> None:
        if self._asked and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _await_end(connection: Connection, stop: Stop) -> None:
    """The connection says nothing more: its end is the sign to stop."""
    try:
        connection.recv()
    except (EOFError, OSError):
        stop.ask()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", metavar="FILE", help="cluster.yaml, see docs/cluster.md")
    parser.add_argument("--role", choices=("lora-server", "instance"))
    parser.add_argument("--name", help="of the instance, unlike all others'  [default: instance-0]")
    parser.add_argument("--lora-server-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_teardown()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if options.lora_server_fd is not None:
        # Whoever started this process decides when it ends; a Ctrl-C in its terminal must not end it first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve_rank(Connection(options.lora_server_fd))
        return
    if options.config is None or options.role is None:
        parser.error("--config and --role are needed")
    if options.name is not None and options.role != "instance":
        parser.error("--name is an instance's")
    from .roles import end_with, serve_role

    if options.parent is not None:
        end_with(options.parent)
    try:
        sys.exit(serve_role(options.config, options.role, options.name or "instance-0"))
    except (MoeLoraError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
