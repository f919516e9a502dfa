"""Entry point of a LoRA Server rank's process: `python -m moe_lora.dist.worker --lora-server-fd FD`."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from .ranks import Started, StartRank

logger = logging.getLogger(__name__)


def serve_rank(connection: Connection) -> None:
    """Serve the rank that the first message describes until the connection closes."""
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


def build_rank(start: StartRank):
    """The `ServerRank` that a start message describes."""
    import torch

    from moe_lora.core.shape import ModelShape
    from moe_lora.dist.lora_server.rank import RankConfig, ServerRank
    from moe_lora.engine.rank import choose_device, choose_dtype
    from moe_lora.models.families import read_config

    config = start.config
    assert config.lora_server is not None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    hf_config = read_config(Path(config.model_dir))
    return ServerRank(
        RankConfig(
            server=config.lora_server,
            shape=ModelShape.from_hf_config(hf_config),
            dtype=choose_dtype(config.dtype, hf_config),
            device=choose_device(config.device),
            server_rank=start.server_rank,
            expert_parallel=config.expert_parallel,
            starvation_s=config.starvation_s,
            adapters=config.adapters,
        )
    )


def _await_end(connection: Connection, stop: Stop) -> None:
    """The connection says nothing more: its end is the sign to stop."""
    try:
        connection.recv()
    except (EOFError, OSError):
        stop.ask()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lora-server-fd", type=int, required=True)
    options = parser.parse_args()
    # Whoever started this process decides when it ends; a Ctrl-C in its terminal must not end it first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve_rank(Connection(options.lora_server_fd))


if __name__ == "__main__":
    main()
