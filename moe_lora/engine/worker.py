"""Entry point of an engine process: `python -m moe_lora.engine.worker FD`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from moe_lora.core.teardown import quiet_teardown

from .heartbeat import beat_until
from .inbox import Inbox
from .messages import Beat, Command, Event, Reply, Stop
from .process import START_CALL_ID, StartEngine


def main(connection: Connection) -> None:
    """Build the engine that the first message describes, then run its loop until the client leaves."""
    start: StartEngine = connection.recv()
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            try:
                connection.send(event)
            except OSError:
                logging.getLogger(__name__).info("the client is gone")

    inbox = Inbox()
    ready = threading.Event()
    threading.Thread(target=_read, args=(connection, inbox.put, ready), daemon=True).start()
    try:
        from .build import build_engine
        from .garbage import collect_rarely
        from .loop import EngineLoop

        loop = EngineLoop(build_engine(start.config), emit, inbox)
    except Exception as error:
        emit(Reply(START_CALL_ID, error=error))
        return
    collect_rarely()
    ready.set()
    emit(Reply(START_CALL_ID))
    beat_until(threading.Event(), start.heartbeat_s, lambda: emit(Beat(loop.pulse.stuck_s())))
    loop.run()


def _read(connection: Connection, put: Callable[[Command], None], ready: threading.Event) -> None:
    """Hand commands on until the client leaves; if it leaves while the engine is being built, end at once."""
    command: Command
    while True:
        try:
            command = connection.recv()
        except (EOFError, OSError):
            command = Stop()
        if isinstance(command, Stop) and not ready.is_set():
            os._exit(0)  # compiling can't be interrupted otherwise, and nobody waits for its result
        put(command)
        if isinstance(command, Stop):
            return


if __name__ == "__main__":
    # The front end decides when the engine ends; a Ctrl-C in its terminal must not end it first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet_teardown()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    main(Connection(int(sys.argv[1])))
