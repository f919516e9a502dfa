"""Entry point of a role's process: a LoRA Server rank, or an LLM instance, of the cluster in a file.

    torchrun --nproc-per-node 2 -m moe_lora.dist.worker --config cluster.yaml --role lora-server
    torchrun -m moe_lora.dist.worker --config cluster.yaml --role instance --name instance-1

A role of one process needs no torchrun: python -m moe_lora.dist.worker and the same options.  With
--lora-server-fd it is a rank that `moe-lora serve` started on its own host.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from moe_lora.core.errors import MoeLoraError

from .ranks import Started, StartRank


def serve_rank(connection: Connection) -> None:
    """Serve the rank that the first message describes until the connection closes."""
    from .build import build_rank

    start: StartRank = connection.recv()
    try:
        rank = build_rank(start)
    except Exception as error:
        connection.send(Started(error))
        return
    connection.send(Started())
    threading.Thread(target=_stop_with, args=(connection, rank.stop), daemon=True).start()
    rank.run()


def _stop_with(connection: Connection, stop: Callable[[], None]) -> None:
    """The connection says nothing more: its end is the sign to stop."""
    try:
        connection.recv()
    except (EOFError, OSError):
        stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", metavar="FILE", help="cluster.yaml, see docs/cluster.md")
    parser.add_argument("--role", choices=("lora-server", "instance"))
    parser.add_argument("--name", help="of the instance, unlike all others'  [default: instance-0]")
    parser.add_argument("--lora-server-fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
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
    from .roles import serve_role

    try:
        sys.exit(serve_role(options.config, options.role, options.name or "instance-0"))
    except (MoeLoraError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
