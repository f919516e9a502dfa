"""`EngineClient` of an engine at the other end of a connection."""

from __future__ import annotations

import logging
import pickle
import threading
from multiprocessing.connection import Connection

from moe_lora.core.errors import EngineDeadError

from .loop_client import LoopClient
from .messages import Command

logger = logging.getLogger(__name__)


class ConnectionClient(LoopClient):
    """Sends commands over `connection`; once `start_reading` was called, takes events from it."""

    def __init__(self, connection: Connection, what: str) -> None:
        self._connection = connection
        self._what = what
        self._send_lock = threading.Lock()
        self._stopping = False
        self._reader: threading.Thread | None = None
        super().__init__(self._send_command)

    def start_reading(self) -> None:
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._reader.start()

    def _send_command(self, command: Command) -> None:
        with self._send_lock:
            self._connection.send(command)

    def _read(self) -> None:
        try:
            while True:
                self.deliver(self._connection.recv())
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            if not self._stopping:
                logger.error("%s is gone: %r", self._what, error)
        finally:
            self.fail(EngineDeadError(f"{self._what} has ended"))
