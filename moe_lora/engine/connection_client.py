"""`EngineClient` of an engine at the other end of a connection."""

from __future__ import annotations

import logging
import pickle
import threading
from multiprocessing.connection import Connection

from moe_lora.core.errors import EngineDeadError

from .loop_client import LoopClient
from .messages import Command
from .outbox import Outbox

logger = logging.getLogger(__name__)


class ConnectionClient(LoopClient):
    """Sends commands over `connection`; once `start_reading` was called, takes events from it."""

    def __init__(self, connection: Connection, what: str) -> None:
        self._connection = connection
        self._what = what
        self._stopping = False
        self._reader: threading.Thread | None = None
        self._outbox: Outbox | None = None
        super().__init__(self._send_command)

    def start_reading(self) -> None:
        self.hearing.excuse()
        self._outbox = Outbox(self._connection)
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._reader.start()

    def _send_command(self, command: Command) -> None:
        assert self._outbox is not None, "commands are sent once the engine has started"
        self._outbox.put(command)

    def _read(self) -> None:
        try:
            while True:
                self.deliver(self._connection.recv())
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            if not self._stopping:
                logger.error("%s is gone: %r", self._what, error)
        finally:
            assert self._outbox is not None
            self._outbox.end()
            self.fail(EngineDeadError(f"{self._what} has ended"))
