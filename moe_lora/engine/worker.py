"""Entry point of an engine process: `python -m moe_lora.engine.worker FD`."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from moe_lora.core.config import EngineConfig

from .messages import Command, Event, Reply, Stop
from .process import START_CALL_ID


def main(connection: Connection) -> None:
    """Build the engine that the first message describes, then run its loop until the client leaves."""
    config: EngineConfig = connection.recv()
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            try:
                connection.send(event)
            except OSError:
                logging.getLogger(__name__).info("the client is gone")

    try:
        from .build import build_engine
        from .loop import EngineLoop

        loop = EngineLoop(build_engine(config), emit)
    except Exception as error:
        emit(Reply(START_CALL_ID, error=error))
        return
    emit(Reply(START_CALL_ID))
    threading.Thread(target=_read, args=(connection, loop.inbox.put), daemon=True).start()
    loop.run()


def _read(connection: Connection, put: Callable[[Command], None]) -> None:
    command: Command
    while True:
        try:
            command = connection.recv()
        except (EOFError, OSError):
            command = Stop()
        put(command)
        if isinstance(command, Stop):
            return


if __name__ == "__main__":
    # The front end decides when the engine ends; a Ctrl-C in its terminal must not end it first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    main(Connection(int(sys.argv[1])))
